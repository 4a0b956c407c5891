from pathlib import Path

import pytest

from ctxlm_ds.apps.init.arguments import canonical, read_command
from ctxlm_ds.errors import ConfigError

SCRIPTS = ("pretrain_bert.py", "pretrain_gpt.py")
SHELL = """#!/bin/bash
# pretrain_bert.py --is-a comment
GPUS=4
DATA=data/my_text_document # the prefix
DISTRIBUTED=(
    --nproc_per_node $GPUS
    --nnodes 2
)
ARGS="
    --num-layers 24 \\
    --lr 1e-4
    --fp16
"
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py \\
    $ARGS --save ${OUT:-runs/a} --load $1 \\
    --data-path 0.3 $DATA 0.7 "b c" --split=949,50,1 > log 2>&1
echo --not an argument
"""


def test_a_script_is_read_without_running_it(tmp_path):
    file = tmp_path / "pretrain.sh"
    file.write_text(SHELL)
    command = read_command(str(file), SCRIPTS)
    assert (command.script, command.ranks) == ("pretrain_gpt.py", 8)
    assert command.given == {
        "--num-layers": ["24"],
        "--lr": ["1e-4"],
        "--fp16": [],
        "--save": ["runs/a"],
        "--load": ["$1"],
        "--data-path": ["0.3", "data/my_text_document", "0.7", "b c"],
        "--split": ["949,50,1"],
    }


def test_a_line_is_read():
    command = read_command("deepspeed --num_gpus 2 /x/pretrain_bert.py --use_flash_attn --hidden-size 64", SCRIPTS)
    assert command.given == {"--use-flash-attn": [], "--hidden-size": ["64"]}
    assert command.ranks == 2
    assert canonical("--Max_seq") == "--Max-seq"


@pytest.mark.parametrize("text", ["", "pretrain_bert.py", "pretrain_bert.py --name 'open", "no-such-file.sh"])
def test_a_text_without_arguments_is_refused(text):
    with pytest.raises(ConfigError, match="arguments"):
        read_command(text, SCRIPTS)


def _given(text):
    command = read_command(text, SCRIPTS)
    return command.given, command.remarks


def test_a_comment_inside_an_array_ends_with_its_line():
    text = """
MODEL_ARGS=(
    --num-layers 24 # layers, don't change
    # --hidden-size 512
    --hidden-size 1024
    --attention-backend auto # Can use (flash/fused/unfused/local)
    --name a#b
)
TRAINING_ARGS=(
    --lr 1e-4
)
torchrun pretrain_bert.py \\
    ${MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} # the end
"""
    names = {"--num-layers": ["24"], "--hidden-size": ["1024"], "--attention-backend": ["auto"], "--name": ["a#b"]}
    assert _given(text) == ({**names, "--lr": ["1e-4"]}, [])


@pytest.mark.parametrize("use", ['"${A[@]}"', "${A[@]}", "${A[*]}", "$A", '"${A[@]:-}"'])
@pytest.mark.parametrize("space", [" ", "\n"])
def test_an_array_gives_its_words(use, space):
    text = f"A=({space}--lr 1e-3{space}--save 'a b')\ntorchrun pretrain_gpt.py --bf16 {use} --seed 1"
    given, remarks = _given(text)
    assert given == {"--bf16": [], "--lr": ["1e-3"], "--save": given["--save"], "--seed": ["1"]} and not remarks
    assert given["--save"] == (["a b"] if use.startswith('"') else ["a", "b"])


def test_assignments_are_read_in_order():
    text = """
A=(--lr 1)
A+=(--seed 2)
B="--split 1,2"
B+=" --save x"
B=" --zero-stage=2 ${B}"
export C=--bf16 D
python pretrain_gpt.py "${A[@]}" $B $C
B=--other
"""
    given = {"--lr": ["1"], "--seed": ["2"], "--zero-stage": ["2"], "--split": ["1,2"], "--save": ["x"], "--bf16": []}
    assert _given(text) == (given, [])


def test_expansions_that_need_no_run():
    text = """
GPUS=4 NODES=2
DIR=`pwd`
BATCH=$((64 * GPUS + ${NODES} ** 3 - 7 / 2))
python pretrain_gpt.py --lr ${LR:-1e-3} --min-lr ${MIN-${LR-0}} --global-batch-size $BATCH --save "${DIR}/a b" \\
  --load $(pwd)/c --data-cache-path $HOME/d:${HOME} --wandb-exp-name $(date +'%y %m') --seed $((X * 2)) --end
"""
    here, home = str(Path.cwd()), str(Path.home())
    assert _given(text)[0] == {
        "--lr": ["1e-3"],
        "--min-lr": ["0"],
        "--global-batch-size": ["261"],
        "--save": [f"{here}/a b"],
        "--load": [f"{here}/c"],
        "--data-cache-path": [f"{home}/d:{home}"],
        "--wandb-exp-name": ["$(date...)"],
        "--seed": ["$((X*2))"],
        "--end": [],
    }


@pytest.mark.parametrize(
    "text",
    [
        """srun -n 2 bash -c "cd x && torchrun --nproc_per_node 2 pretrain_gpt.py --lr $LR --save 'a b'" """,
        """CMD="torchrun --nproc_per_node 2 pretrain_gpt.py --lr $LR --save 'a b'"\necho $CMD\neval $CMD > log""",
        """RUN="torchrun --nproc_per_node 2 pretrain_gpt.py --lr $LR --save 'a b'"\nssh host "$RUN" 2>&1 | tee log""",
        """sbatch <<EOT\n#!/bin/bash\ntorchrun --nproc_per_node 2 pretrain_gpt.py --lr $LR --save 'a b'\nEOT""",
    ],
)
def test_a_command_inside_quotes_is_found(text):
    command = read_command(f"LR=1\n{text}\n", SCRIPTS)
    assert command.given == {"--lr": ["1"], "--save": ["a b"]} and command.ranks == 2


def test_prose_that_names_the_script_is_passed_over():
    text = "cat <<EOF\nUsage: don't call pretrain_gpt.py yourself\nEOF\npython pretrain_gpt.py --num-layers 3\n"
    assert _given(text)[0] == {"--num-layers": ["3"]}


def test_both_branches_are_read_with_a_remark():
    text = "if [ $S = small ]; then\n  N=2\nelse\n  N=24\nfi\ncase $S in\n a) H=8 ;;\nesac\n"
    given, remarks = _given(text + "python pretrain_gpt.py --num-layers $N --hidden-size $H")
    assert given == {"--num-layers": ["24"], "--hidden-size": ["8"]}
    assert remarks == ["assignments under a condition (if, case, &&, ||) were all read, in order"]


def test_what_is_not_read_gives_a_remark():
    text = "torchrun $D --nnodes $N pretrain_gpt.py $A --lr 1\n  --seed 2\npython pretrain_bert.py --bf16"
    given, remarks = _given(text)
    assert given == {"--lr": ["1"]}
    parts = ["$D before pretrain_gpt.py", "--nnodes $N", "$A before the first", "--seed: the line", "2 commands of"]
    assert all(any(part in remark for remark in remarks) for part in parts), remarks


def test_values_that_grow_without_end_are_refused():
    text = "A=xxxxxxxxxx\n" + 'A="$A$A"\n' * 40 + "python pretrain_gpt.py --lr $A"
    with pytest.raises(ConfigError, match="more than 10,000,000 characters"):
        read_command(text, SCRIPTS)
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_command("python pretrain_gpt.py --lr " + "$(" * 50_000, SCRIPTS)
