import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.new_recipe.arguments import canonical, read_command

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
