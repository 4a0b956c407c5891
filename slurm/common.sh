# shellcheck shell=bash
# Sourced by every batch script: finds the checkout and python, and reads env.sh. Needs CTXLM_HOME (see the scripts).

# What a login shell may have left over from another launcher would mislead every rank.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

set -a # what env.sh sets is exported
# shellcheck source=slurm/env.sh
source "${CTXLM_ENV:-$CTXLM_HOME/slurm/env.sh}"
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

CTXLM_PYTHON=$(ctxlm_python) || exit 2
PATH=$(dirname "$CTXLM_PYTHON"):$PATH
PYTHONPATH=$CTXLM_HOME${PYTHONPATH:+:$PYTHONPATH}
export PATH PYTHONPATH
export CTXLM_HOME CTXLM_PYTHON
