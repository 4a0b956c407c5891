# shellcheck shell=bash
# Sourced by every batch script: finds the checkout and python, and reads env.sh. Needs CTXLM_HOME (see the scripts).

# Variables of another launcher in the login shell would mislead every rank.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

# The interpreter and PATH of the submitting job or shell are not kept: env.sh may differ here.
[ "${CTXLM_PYTHON:-}" != "${CTXLM_FOUND_PYTHON:-}" ] || unset CTXLM_PYTHON
PATH=${PATH#"${CTXLM_PATH_HEAD:-/}:"}

ctxlm_env=${CTXLM_ENV:-$CTXLM_HOME/slurm/env.sh}
[ -r "$ctxlm_env" ] || { echo "error: $ctxlm_env cannot be read; it holds the settings of this cluster (CTXLM_ENV)" >&2; exit 2; }
bash -n "$ctxlm_env" || { echo "error: $ctxlm_env is not valid shell; see above" >&2; exit 2; }
set -a # what env.sh sets is exported
# shellcheck source=slurm/env.sh
source "$ctxlm_env"
set +a

ctxlm_python() { # prints the interpreter
    local venv=${CTXLM_VENV:-$CTXLM_HOME/.venv}
    if [ -n "${CTXLM_PYTHON:-}" ]; then
        echo "$CTXLM_PYTHON"
    elif [ -x "$venv/bin/python" ]; then
        echo "$venv/bin/python"
    elif [ -n "${CTXLM_VENV:-}" ]; then
        echo "slurm/env.sh: CTXLM_VENV=$CTXLM_VENV has no bin/python" >&2
        return 2
    else
        command -v python3 || command -v python || { echo "no python found; set CTXLM_VENV in slurm/env.sh" >&2; return 2; }
    fi
}

CTXLM_FOUND_PYTHON=$(ctxlm_python) || exit 2
[ -z "${CTXLM_PYTHON:-}" ] || CTXLM_FOUND_PYTHON= # the user set it
CTXLM_PYTHON=${CTXLM_PYTHON:-$CTXLM_FOUND_PYTHON}
CTXLM_PATH_HEAD=$(dirname "$CTXLM_PYTHON")
PATH=$CTXLM_PATH_HEAD:$PATH
[[ ${PYTHONPATH:-}: == "$CTXLM_HOME:"* ]] || PYTHONPATH=$CTXLM_HOME${PYTHONPATH:+:$PYTHONPATH}
export CTXLM_HOME CTXLM_PYTHON CTXLM_FOUND_PYTHON CTXLM_PATH_HEAD PATH PYTHONPATH

# shellcheck disable=SC2034
ctxlm_container() { # sets `python`, `inside` (words before a command) and `of_srun` for the container of env.sh
    local options=()
    of_srun=() inside=() python=$CTXLM_PYTHON
    if [ -n "${CTXLM_PYXIS:-}" ]; then
        read -r -a options <<<"${CTXLM_PYXIS_OPTIONS:-}"
        of_srun=("--container-image=$CTXLM_PYXIS" "${options[@]}")
    elif [ -n "${CTXLM_CONTAINER:-}" ]; then
        read -r -a options <<<"${CTXLM_CONTAINER_OPTIONS:-}"
        inside=(apptainer exec --nv "${options[@]}" "$CTXLM_CONTAINER")
    fi
    [ -z "${CTXLM_PYXIS:-}${CTXLM_CONTAINER:-}" ] || python=${CTXLM_CONTAINER_PYTHON:-python3}
}

need_run() { # end a job that needs a complete run (CTXLM_NEEDED_RUN) if that run was stopped before its end
    [ -z "${CTXLM_NEEDED_RUN:-}" ] || "$CTXLM_PYTHON" -m ctxlm_ds.process.run_history "$CTXLM_NEEDED_RUN" || {
        echo "error: $CTXLM_NEEDED_RUN has not been trained to its end" >&2
        exit 2
    }
}
