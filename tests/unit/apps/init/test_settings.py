import pytest

from ctxlm_ds.apps.init.settings import (
    Setting,
    canonical,
    check_output,
    read_command,
    read_words,
    recipe_text,
    write_recipe,
)
from ctxlm_ds.errors import ConfigError

SCRIPTS = ("pretrain_bert.py", "pretrain_gpt.py")
FILE = """# pretrain_bert.py --is-a comment
torchrun --nproc_per_node 4 --nnodes=2 pretrain_gpt.py \\
    --num-layers 24 --lr 1e-4 --fp16 # the end
    --data-path 0.3 a 0.7 "b c" --split=949,50,1
"""
SETTINGS = {
    "training.max_steps": Setting(7, "--train-iters 7"),
    "data.train": Setting([{"path": "a b", "weight": 0.5}], "--data-path"),
    "data.blend": Setting("megatron", ""),
    "name": Setting("true", "text"),
    "tokenizer.path": Setting(None, ""),
}


def test_settings_are_written_in_the_schemas_order_and_read_back(tmp_path):
    text = recipe_text(["first", ""], SETTINGS)
    lines = [line.partition("  #")[0].rstrip() for line in text.splitlines()]
    assert lines == [
        "# first", "#", 'name: "true"', "tokenizer:", "  path: null", "data:", "  train:",
        '    - {"path": "a b", "weight": 0.5}', "  blend: megatron", "training:", "  max_steps: 7",
    ]  # fmt: skip
    config = write_recipe(tmp_path / "x.yaml", text)
    assert (config.name, config.training.max_steps, config.data.train[0].path) == ("true", 7, "a b")


@pytest.mark.parametrize("separator", ["\n", "\r", "\x85", "\u2028", "\u2029", "\x1c", "\x00", "\ufeff", "\udcff"])
def test_no_text_of_a_command_ends_the_comment_that_it_is_in(separator, tmp_path):
    source = f"--train-iters 7{separator}initialize_from: evil{separator}deepspeed: evil"
    settings = {"training.max_steps": Setting(7, source), "data.train": Setting([{"path": "a"}], source)}
    config = write_recipe(tmp_path / "x.yaml", recipe_text([f"of a{separator}name: evil"], settings))
    assert (config.training.max_steps, config.data.train[0].path) == (7, "a")
    assert "evil" not in config.flat().values()


def test_nothing_is_overwritten_and_nothing_invalid_stays(tmp_path):
    path = tmp_path / "x.yaml"
    with pytest.raises(ConfigError, match=r"x\.yaml: 1 problem\n.*max_steps.*/x\.yaml:1"):
        write_recipe(path, "training: {max_steps: -1}\n")
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        check_output(path, force=False)
    check_output(path, force=True)
    with pytest.raises(ConfigError, match=r"max_steps"):
        write_recipe(path, "training: {max_steps: -1}\n")
    assert path.read_text() == "mine" and [one.name for one in tmp_path.iterdir()] == ["x.yaml"]
    with pytest.raises(ConfigError, match=r"ends in .yaml"):
        check_output(tmp_path / "x.txt", force=True)


def test_a_file_of_arguments_is_read(tmp_path):
    file = tmp_path / "arguments.txt"
    file.write_text(FILE)
    command = read_command(read_words(file), SCRIPTS)
    assert (command.script, command.ranks, command.notes) == ("pretrain_gpt.py", 8, [])
    assert command.arguments == {
        "--num-layers": ["24"], "--lr": ["1e-4"], "--fp16": [], "--data-path": ["0.3", "a", "0.7", "b c"],
        "--split": ["949,50,1"],
    }  # fmt: skip
    file.write_bytes(b"pretrain_bert.py --vocab-file a \\\r\n  --lr 0.1\r\n")
    assert read_command(read_words(file), SCRIPTS).arguments == {"--vocab-file": ["a"], "--lr": ["0.1"]}
    file.write_text("pretrain_bert.py --name 'open")
    with pytest.raises(ConfigError, match="not a list of arguments"):
        read_words(file)


def test_a_list_is_read():
    words = ["deepspeed", "--num_gpus", "2", "/x/pretrain_bert.py", "--use_flash_attn", "--hidden-size", "64"]
    command = read_command(words, SCRIPTS)
    assert command.arguments == {"--use-flash-attn": [], "--hidden-size": ["64"]}
    assert command.ranks == 2
    assert canonical("--Max_seq") == "--Max-seq"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name none of pretrain_bert.py, pretrain_gpt.py"),
        (["--num-layers", "2"], "name none of"),
        (["pretrain_bert.py"], "no arguments follow"),
        (["pretrain_bert.py", "--lr", "${LR}"], r"\$\{LR\}: scripts are not run.*`echo`"),
        (["pretrain_bert.py", "--lr", "`rate`"], "scripts are not run"),
    ],
)
def test_what_is_no_list_of_arguments_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        read_command(words, SCRIPTS)
