#!/bin/bash
# From raw text to an exported model as jobs: slurm/pipeline.sh RECIPE.yaml [--set a.b=c ...] [--dry-run | --status] [--redo]
CTXLM_HOME=${CTXLM_HOME:-$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)}
# shellcheck source=slurm/common.sh
source "$CTXLM_HOME/slurm/common.sh" || exit 2
exec "$CTXLM_PYTHON" -m ctxlm_ds.cluster.pipeline "$@"
