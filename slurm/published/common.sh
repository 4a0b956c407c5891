# shellcheck shell=bash
# Sourced by the scripts beside it, in a job: the layout for this job's GPUs and nodes, and one phase after the other.
# Needs CTXLM_HOME.

gpu_type() { # prints the GPU's name in layouts.txt; CTXLM_GPU wins
    if [ -n "${CTXLM_GPU:-}" ]; then
        echo "$CTXLM_GPU"
        return
    fi
    case "$(nvidia-smi --query-gpu=name,memory.total --format=csv,noheader 2>/dev/null | head -n 1)" in
        *H200*) echo H200 ;;
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

pretrain() { # WORDS...: slurm/pretrain.sbatch with them, handing signals on; its exit status
    local pid status
    bash "$CTXLM_HOME/slurm/pretrain.sbatch" "$@" &
    pid=$!
    trap 'kill -USR1 "$pid"' USR1
    trap 'kill -TERM "$pid"' TERM
    [ -z "${CTXLM_NOTICE:-}" ] || kill -TERM "$pid"
    while wait "$pid"; status=$?; [ "$status" -gt 128 ] && kill -0 "$pid" 2>/dev/null; do :; done # a trap ends wait
    trap 'export CTXLM_NOTICE=1' USR1 TERM
    return "$status"
}

pretrain_one() { # RECIPE ARGUMENTS...
    find_layout "$1"
    exec bash "$CTXLM_HOME/slurm/pretrain.sbatch" "$1" "${LAYOUT[@]}" "${@:2}"
}

pretrain_two() { # RECIPE1 RECIPE2 ARGUMENTS...: the second with the first one's weights, in the folders CTXLM_RUNS/RECIPE
    local runs=${CTXLM_RUNS:-runs}
    if ! "$CTXLM_PYTHON" -m ctxlm_ds.process.run_history "$runs/$1"; then
        find_layout "$1"
        pretrain "$1" "${LAYOUT[@]}" "${@:3}" --set "run_dir=$runs/$1" || exit
        # Else the job has been put back, and goes on with the first phase.
        "$CTXLM_PYTHON" -m ctxlm_ds.process.run_history "$runs/$1" || exit 0
    fi
    find_layout "$2"
    exec bash "$CTXLM_HOME/slurm/pretrain.sbatch" "$2" "${LAYOUT[@]}" "${@:3}" \
        --set "run_dir=$runs/$2" "initialize_from=$runs/$1"
}

# shellcheck source=slurm/common.sh
source "$CTXLM_HOME/slurm/common.sh" || exit
