#!/bin/bash
# Check an allocation before training: on every node the GPUs (nvidia-smi, dcgmi) and the scratch disk, then one all-reduce
# of all ranks. Inside a job or salloc:
#
#   slurm/preflight.sh [--requeue]
#
# Prints a line per node; status 1 if a node is bad or the all-reduce fails. --requeue puts the job back without bad nodes.
if [ "${1:-}" = --node ]; then # on each node, by srun
    scratch=${CTXLM_STAGE_DIR:-${TMPDIR:-/tmp}} expected=${SLURM_GPUS_ON_NODE:-0}
    found="no nvidia-smi, GPUs are not checked" faults=()
    if command -v nvidia-smi >/dev/null; then
        gpus=$(timeout 20 nvidia-smi --query-gpu=name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total --format=csv,noheader,nounits 2>&1)
        number=$(grep -c ', [0-9]' <<<"$gpus")
        found="$number x ${gpus%%,*}"
        [ "$number" -ge "$expected" ] || faults+=("$number of $expected GPUs: $gpus") # one that fell off the bus is missing
        mapfile -t -O ${#faults[@]} faults < <(awk -F', ' '$4 + 0 > 0 { print "GPU " NR - 1 ": " $4 " uncorrected ECC errors" }
            $3 + 0 > 0.1 * $2 { print "GPU " NR - 1 ": " $3 " of " $2 " MiB are in use" }' <<<"$gpus")
    fi
    ! command -v dcgmi >/dev/null || mapfile -t -O ${#faults[@]} faults < <(timeout 60 dcgmi diag -r 1 2>&1 | grep Fail)
    mkdir -p "$scratch" && probe=$(mktemp "$scratch/.preflight-XXXXXX") && rm "$probe" || faults+=("$scratch cannot be written")
    printf "preflight: $SLURMD_NODENAME: %s\n" "$found" "${faults[@]/#/BAD: }"
    exit
fi
CTXLM_HOME=${CTXLM_HOME:-$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)}
# shellcheck source=slurm/common.sh
source "$CTXLM_HOME/slurm/common.sh" || exit 2
[ -n "${SLURM_JOB_ID:-}" ] || { echo "error: no Slurm job; inside salloc: slurm/preflight.sh" >&2; exit 2; }
ctxlm_container && bad=() nodes=$SLURM_JOB_NUM_NODES
lines=$(timeout 180 srun --overlap --kill-on-bad-exit=0 --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 bash "$0" --node 2>&1)
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    grep -q "^preflight: $node: " <<<"$lines" || lines+=$'\n'"preflight: $node: BAD: no answer"
    ! grep -q "^preflight: $node: BAD" <<<"$lines" || bad+=("$node")
done
echo "$lines"
reduce='
import time
from ctxlm_ds.process.launch import discover_ranks, prepare_process
prepare_process(ranks := discover_ranks())
import torch
device = torch.device("cuda", ranks.device_index) if torch.cuda.is_available() else torch.device("cpu")
torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
for _ in range(2):
    begin_s, values = time.time(), torch.ones(1 << 24, device=device)
    torch.distributed.all_reduce(values)
    right = values.eq(ranks.world_size).all().item()
speed = values.nbytes * 2 * (ranks.world_size - 1) / ranks.world_size / (time.time() - begin_s) / 1e9
if ranks.rank == 0: print(f"preflight: all-reduce of 64 MiB over {ranks.world_size} ranks: {speed:.3g} GB/s", flush=True)
assert right, "wrong sum"'
if [ ${#bad[@]} -eq 0 ]; then
    timeout 180 srun --overlap --kill-on-bad-exit=1 "${of_srun[@]}" "${inside[@]}" "$python" -c "$reduce" && exit
    echo "error: preflight: the all-reduce of all ranks failed, or took more than 180 s; see above" >&2 && exit 1
fi
exclude=$(IFS=, && echo "${bad[*]}")
[ "${1:-}" = --requeue ] || { echo "error: preflight: bad nodes, see above; submit with --exclude=$exclude" >&2; exit 1; }
echo "preflight: requeueing the job without $exclude"
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID} job=${job:-$SLURM_JOB_ID}
before=$(scontrol show job "$job" | sed -n 's/.*ExcNodeList=\([^ ]*\).*/\1,/p' | grep -v null)
trap '' TERM USR1 # Slurm ends this script, but takes a new list of nodes only from a job that is pending
scontrol requeue "$job" && for _ in 1 2 3 4 5; do scontrol update JobId="$job" ExcNodeList="$before$exclude" && break; sleep 0.5; done
exit 1
