#!/bin/bash
# Copy what a recipe reads (datasets, sample indexes, tokenizer, teacher) to the disk of every node of a job, verify it with
# sha256sum, and print the settings that make the run read the copies, one per line; without a job, on this machine:
#
#   slurm/stage.sh DIR RECIPE.yaml [options of ctxlm_ds.pretrain]
#
# slurm/pretrain.sbatch calls it if CTXLM_STAGE_DIR is set. If one node fails, nothing is printed, because all ranks must
# read the same. A file of the same size and time is not copied again.

copy() { # AGAIN SOURCE FOLDER: with rsync, or cp if it is missing; AGAIN also copies what has the same size and time
    mkdir -p "$3" || return
    if command -v rsync >/dev/null; then
        rsync --recursive --copy-links --times ${1:+--ignore-times} "$2" "$3/"
    else
        local newer=()
        [ -n "$1" ] || newer=(--update)
        cp --recursive --dereference --preserve=timestamps --remove-destination "${newer[@]}" "$2" "$3/"
    fi
}

stage() { # on each node; the plan is the input
    local plan kind source folder
    plan=$(cat)
    verify() { sed -n 's/^sum\t//p' <<<"$plan" | sha256sum --check --quiet -; }
    for again in '' again; do # if a copy is damaged
        while IFS=$'\t' read -r kind source folder; do
            [ "$kind" != copy ] || copy "$again" "$source" "$folder" || return
        done <<<"$plan"
        verify >&2 && return
    done
    return 1
}

if [ "${1:-}" = --node ]; then
    stage || { echo "staging: ${SLURMD_NODENAME:-this node}: failed, see above; if a source is damaged, make it again" >&2; exit 1; }
    exit
fi
CTXLM_HOME=${CTXLM_HOME:-$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)}
# shellcheck source=slurm/common.sh
source "$CTXLM_HOME/slurm/common.sh" || exit 2
ctxlm_container
[ ${#of_srun[@]} -eq 0 ] || inside=(srun --nodes=1 --ntasks=1 "${of_srun[@]}")
each=(bash) # of the nodes
[ -z "${SLURM_JOB_ID:-}" ] || each=(srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --input=all bash)
seconds=$SECONDS
if ! { plan=$("${inside[@]}" "$python" -m ctxlm_ds.apps.cluster.inputs "$@") && "${each[@]}" "$0" --node <<<"$plan" >&2; }; then
    echo "staging: not every node has its copies; everything is read from where the recipe says" >&2
    exit 1
fi
echo "staging: ${SLURM_JOB_NUM_NODES:-1} nodes have their copies in $1, after $((SECONDS - seconds)) s" >&2
sed -n 's/^set\t//p' <<<"$plan"
