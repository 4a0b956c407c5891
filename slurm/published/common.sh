# shellcheck shell=bash
# Sourced by the scripts beside it, in a job: the layout for this job's GPUs and nodes. Needs
# CTXLM_HOME.

gpu_type() { # prints the GPU's name in layouts.txt; CTXLM_GPU wins
    if [ -n "${CTXLM_GPU:-}" ]; then
        echo "$CTXLM_GPU"
        return
    fi
    case "$(nvidia-smi --query-gpu=name,memory.total --format=csv,noheader 2>/dev/null | head -n 1)" in
        *\ H200*) echo H200 ;; # not GH200, which has less memory
        *H100*) echo H100 ;;
        *A100*8[0-9][0-9][0-9][0-9]\ MiB) echo A100-80 ;;
        *A100*) echo A100-40 ;;
        *V100*3[0-9][0-9][0-9][0-9]\ MiB) echo V100-32 ;;
    esac
}

find_layout() { # RECIPE: sets LAYOUT to the words for ctxlm_ds.pretrain; empty where there is none
    local recipe gpu nodes deepspeed settings type tasks
    LAYOUT=()
    type=$(gpu_type)
    tasks=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))
    while read -r recipe gpu nodes deepspeed settings; do
        if [ "$recipe $gpu $nodes" = "$1 $type $SLURM_JOB_NUM_NODES" ] && [ "$tasks" = 8 ]; then
            read -r -a LAYOUT <<<"$settings"
            LAYOUT=(--deepspeed_config "$deepspeed" --set "${LAYOUT[@]}")
            echo "layout for $SLURM_JOB_NUM_NODES x 8 $type: ${LAYOUT[*]}"
            return
        fi
    done <"$CTXLM_HOME/slurm/published/layouts.txt"
    echo "no layout for $SLURM_JOB_NUM_NODES x $tasks ${type:-unknown GPU} in slurm/published/layouts.txt: the recipe's" \
        "own micro-batch is taken; ctxlm plan --config $1 finds one for --set"
}

pretrain_one() { # RECIPE ARGUMENTS...
    find_layout "$1"
    exec bash "$CTXLM_HOME/slurm/pretrain.sbatch" "$1" "${LAYOUT[@]}" "${@:2}"
}

# shellcheck source=slurm/common.sh
source "$CTXLM_HOME/slurm/common.sh" || exit
