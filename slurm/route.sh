#!/bin/bash
# shellcheck disable=SC2086,SC2206 # settings may hold several words
# From raw text to an exported model as Slurm jobs that wait for each other (docs/route.md):
#
#   tokenizer -> preprocess (an array of shards) -> merge -> samples -> pretrain -> export -> AFTER
#
#   slurm/route.sh RECIPE [SETTING=VALUE ...] [--dry-run] [--set a.b=c ...]
#
# Run it again if a job has failed: every tool resumes, and finished steps end in seconds.

CTXLM_HOME=${CTXLM_HOME:-$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)}
# shellcheck source=slurm/common.sh
source "$CTXLM_HOME/slurm/common.sh" || exit 2
set -e -f -o pipefail

# ---- settings: RECIPE.env beside RECIPE.yaml changes them, then the command line; several words between blanks ----
INPUT=              # texts: files, globs, hf://NAME; empty: begin at the samples, with tokenizer.path and data.train
HELDOUT=            # held-out texts; empty: none, or --set data.split=969,30,1
JSON_KEY=text       # the key or column that holds the text
OUT=                # output folder; empty: routes/NAME, NAME being the recipe's
TOKENIZER=          # a finished tokenizer; empty: train one
TOKENIZER_TYPE=     # empty: the one that the model's family was published with
VOCAB_SIZE=         # empty: the published model's
TOKENIZER_OPTIONS=  # further options of ctxlm tokenizer
PREPROCESS_OPTIONS= # further options of ctxlm preprocess
EXPORT_OPTIONS=     # further options of ctxlm convert to-hf
SHARDS=1            # jobs that preprocess in parallel
WORKERS=4           # processes of each of them, and threads that build samples
NODES=1             # of a pretraining job
RANKS=1             # of each of its nodes: GPUs, or CPU ranks
OPTIONS=            # of sbatch, for every job: --account=me --partition=gpu
CPU_OPTIONS=        # for all but pretraining: --partition=cpu --mem=32G
PRETRAIN_OPTIONS=   # for pretraining: --gpus-per-node=8 --time=24:00:00
AFTER=              # a line of shell to run at the end; it finds $OUT, $TOKENIZER, $RUN and $HF

die() { echo "error: $*" >&2 && exit 2; }

recipe='' given=() sets=() dry_run=
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry_run=1 ;;
        --set) while [[ ${2:-} == [a-z]*=* ]]; do sets+=("$2") && shift; done ;;
        [A-Z]*=*)
            [[ -v ${1%%=*} ]] || die "${1%%=*}: no such setting; they are listed at the top of $0"
            given+=("$1")
            ;;
        -*) die "$1: no such option; usage at the top of $0" ;;
        *)
            [ -z "$recipe" ] || die "$1: a route has one recipe, with all phases of the run (docs/phases.md)"
            recipe=$1
            ;;
    esac
    shift
done
[ -n "$recipe" ] || die "name a recipe; usage at the top of $0"
# shellcheck source=/dev/null
[ ! -r "${recipe%.yaml}.env" ] || source "${recipe%.yaml}.env"
[ ${#given[@]} -eq 0 ] || declare "${given[@]}"

# ---- facts of the recipe: its name, its family's tokenizer, the form of its documents ----
facts=$("$CTXLM_PYTHON" - "$recipe" "${sets[@]}" <<'END'
import sys
from ctxlm_ds.console import run_command
from ctxlm_ds.recipe.load import load_config
from ctxlm_ds.registry import FAMILIES
def show():
    config = load_config(sys.argv[1], sys.argv[2:])
    form = ["sentence", "--split-sentences"] if config.data.by_sentence else ["document"]
    eod = ["--append-eod"] if config.data.ends_documents else []
    print(config.name.replace(" ", "_"), FAMILIES.get(config.model.family).tokenizer, *form, *eod)
run_command(show)
END
)
read -r name family_tokenizer form form_options <<<"$facts"
OUT=$(realpath -m "${OUT:-routes/$name}")
[[ $OUT != *[[:space:],%]* ]] || die "OUT=$OUT: blanks, commas and % cannot be part of it"
train=$OUT/data/train_${JSON_KEY}_$form
jobs=${name//[^A-Za-z0-9._-]/_}-$(cksum <<<"$OUT" | cut -d' ' -f1)
makes_tokenizer='' RUN=$OUT/pretrain
[ -z "$INPUT" ] || [ -n "$TOKENIZER" ] || makes_tokenizer=1 TOKENIZER=$OUT/tokenizer
[ -z "$TOKENIZER" ] || sets=("tokenizer.path=$TOKENIZER" "${sets[@]}")
[ -z "$INPUT" ] || sets=("data.train=[$train]" "${sets[@]}")
[ -z "$HELDOUT" ] || [ -n "$TOKENIZER" ] || die "HELDOUT without INPUT needs TOKENIZER"
[ -z "$HELDOUT" ] || sets=("data.validation=[{name: heldout, path: $OUT/data/heldout_${JSON_KEY}_$form}]" "${sets[@]}")
sets+=("run_dir=$RUN")
# a mistake in the recipe is reported before anything is submitted
"$CTXLM_PYTHON" -m ctxlm_ds.pretrain --config "$recipe" --check --print --world-size $((NODES * RANKS)) \
    --set "${sets[@]}" >/dev/null
if [ -z "$dry_run" ]; then
    queued=$(squeue --noheader "--user=$(id -u)" --format='%i %j')
    queued=$(grep -F " $jobs-" <<<"$queued") && die "jobs of $OUT are in the queue; wait, or scancel them:"$'\n'"$queued"
    mkdir -p "$OUT/logs"
fi

# ---- a job ----
submitted=() extra=()
submit() { # STEP IDS WORDS...: sbatch after the jobs IDS (separated by blanks), with the options `extra`; sets ID
    local step=$1 after words
    read -r -a after <<<"$2"
    words=(sbatch --parsable "--job-name=$jobs-$step" "--output=$OUT/logs/$step-%j.log" $OPTIONS "${extra[@]}")
    [ ${#after[@]} -eq 0 ] || words+=("--dependency=afterok$(printf ':%s' "${after[@]}")" --kill-on-invalid-dep=yes)
    words+=("${@:3}")
    extra=()
    if [ -n "$dry_run" ]; then
        ID=$step
        printf '%q ' "${words[@]}" && echo
    elif ID=$("${words[@]}"); then
        ID=${ID%%;*}
        submitted+=("$ID")
        echo "$step: job $ID${after[*]:+, after ${after[*]}}"
    else
        [ ${#submitted[@]} -eq 0 ] || scancel "${submitted[@]}"
        die "$step: sbatch refuses it, see above; the jobs before it are cancelled"
    fi
}
step() { submit "$1" "$2" "--cpus-per-task=$WORKERS" $CPU_OPTIONS "$CTXLM_HOME/slurm/step.sbatch" "${@:3}"; }
tool() { step "$1" "$2" python -m ctxlm_ds.cli "${@:3}"; } # STEP IDS COMMAND WORDS..., as of ctxlm

# ---- the route ----
tokenizer='' datasets=''
if [ -n "$makes_tokenizer" ]; then
    tool tokenizer '' tokenizer --input $INPUT --json-keys "$JSON_KEY" --type "${TOKENIZER_TYPE:-$family_tokenizer}" \
        ${VOCAB_SIZE:+--vocab-size $VOCAB_SIZE} $TOKENIZER_OPTIONS --output-dir "$TOKENIZER"
    tokenizer=$ID
fi
preprocess() { # STEP PATTERNS PREFIX WORDS...
    tool "$1" "$tokenizer" preprocess --input $2 --json-keys "$JSON_KEY" --tokenizer "$TOKENIZER" $form_options \
        --workers "$WORKERS" $PREPROCESS_OPTIONS --output-prefix "$OUT/data/$3" "${@:4}"
    datasets+=" $ID"
}
[ -z "$HELDOUT" ] || preprocess preprocess-heldout "$HELDOUT" heldout
if [ -n "$INPUT" ] && [ "$SHARDS" -eq 1 ]; then
    preprocess preprocess "$INPUT" train
elif [ -n "$INPUT" ]; then
    # step.sbatch replaces %a by the job's number in the array
    extra=("--array=0-$((SHARDS - 1))" "--output=$OUT/logs/preprocess-%A_%a.log")
    preprocess preprocess "$INPUT" shards/train --shard "%a/$SHARDS"
    parts=$(seq -f "$OUT/data/shards/${train##*/}_shard%05g-of-$(printf %05d "$SHARDS")" 0 $((SHARDS - 1)))
    tool merge "$ID" merge --input $parts --output-prefix "$train"
    datasets+=" $ID"
fi
tool samples "$datasets" samples --config "$recipe" --workers "$WORKERS" --set "${sets[@]}"
submit pretrain "$ID" --nodes="$NODES" --ntasks-per-node="$RANKS" $PRETRAIN_OPTIONS \
    "$CTXLM_HOME/slurm/pretrain.sbatch" "$recipe" --set "${sets[@]}"
extra=("--export=ALL,CTXLM_NEEDED_RUN=$RUN") # the export fails if the run was stopped before its end
tool export "$ID" convert to-hf --checkpoint "$RUN" --output "$OUT/hf" $EXPORT_OPTIONS
[ -z "$AFTER" ] || step after "$ID" env "OUT=$OUT" "TOKENIZER=$TOKENIZER" "RUN=$RUN" "HF=$OUT/hf" bash -c "$AFTER"
