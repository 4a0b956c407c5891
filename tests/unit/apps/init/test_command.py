import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.apps.init.command import main
from ctxlm_ds.errors import ConfigError, DataError
from ctxlm_ds.recipe.load import load_config

GPT = "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3 --my-own"
REST = " --max-position-embeddings 32 --micro-batch-size 4 --train-iters 50 --data-path a_text_document"


def test_flags_write_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("A text.\n")
    main(["--family", "gpt2", "--text", "corpus.txt", "--document", "lines:50", "--ranks", "2", "--hours", "0.1"])
    printed = capsys.readouterr().out
    assert "ctxlm tokenizer --input corpus.txt --type gpt2 --vocab-size 4000 --output-dir gpt2-tokenizer" in printed
    assert "--document lines:50 --append-eod --output-prefix data/gpt2" in printed
    assert "ctxlm pretrain --config gpt2.yaml --ranks 2" in printed
    config = load_config("gpt2.yaml", world_size=2)
    assert (config.model.family, config.data.train[0].path) == ("gpt2", "data/gpt2_text_document")
    assert (config.data.split, config.data.split_seed) == ("90,10,0", 0)
    with pytest.raises(ConfigError, match=r"gpt2.yaml exists"):
        main(["--family", "gpt2", "--text", "corpus.txt"])
    Path("gpt2.yaml").write_text("name: old\n")
    main(["--family", "gpt2", "--tokenizer", "other", "--force"])
    assert load_config("gpt2.yaml").tokenizer.path == "other"
    for hours in ("0", "9e9", "inf", "nan"):
        with pytest.raises(ConfigError, match=r"--hours \S+: expected a number above 0 and up to 8,760"):
            main(["--family", "gpt2", "--hours", hours, "--output", "other.yaml"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("none.txt", "none.txt: no such file"),
        (".", ". is a folder; name its files"),
        ("text.docx", "archives, documents and Arrow files are not read"),
        ("latin.txt", "latin.txt, line 3: not valid UTF-8"),
        ("empty.txt", "the files hold no text"),
    ],
)
def test_text_that_preprocess_refuses_is_refused_at_once(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in (("text.docx", b"PK"), ("latin.txt", b"Fine.\n\nf\xfcr\n"), ("empty.txt", b"\n")):
        Path(name).write_bytes(content)
    with pytest.raises(DataError, match=told):
        main(["--text", text])
    assert not Path("bert.yaml").exists()


def test_what_an_option_of_preprocess_settles_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --hours the duration is printed, too."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("keys.jsonl", '{"content": "a"}\n'), ("bad.jsonl", '{"text": "a"}\n{"te\n')):
        Path(name).write_text(text)
        main(["--text", name, "--force"])
        printed = capsys.readouterr().out
        assert printed.startswith(f"warning: {name}, line ") and "; for another length: --hours H)\n" in printed
        steps, hours, per_step = re.findall(r"([\d,]+) steps .* about (\S+) hours at an estimated (\S+) s", printed)[0]
        assert float(hours) == pytest.approx(int(steps.replace(",", "")) * float(per_step) / 0.9 / 3600, rel=0.02)


def test_few_steps_and_a_small_vocabulary_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("some text\n" * 50_000)
    main(["--family", "bert", "--text", "corpus.txt", "--hours", "1e-9"])
    printed = capsys.readouterr().out
    assert (
        ", 1 step (1e-09 hours, a tenth" in printed
        and "warning: 1e-09 hours allow 1 step; give more --hours" in printed
    )
    assert "--type wordpiece --vocab-size 4000 --output-dir bert-tokenizer" in printed


def test_a_misspelt_argument_of_megatron_writes_nothing(tmp_path):
    words = f"{GPT}{REST} --hidden-sizes 32 --bf17".split()
    message = r"no such argument: --hidden-sizes: did you mean --hidden-size\? --bf17: did you mean --bf16\?"
    with pytest.raises(ConfigError, match=message):
        main(["--from-megatron", "--output", str(tmp_path / "x.yaml"), "--", *words])
    assert not (tmp_path / "x.yaml").exists()


def test_megatrons_arguments_write_a_recipe(tmp_path, capsys):
    output = tmp_path / "x.yaml"
    main(["--from-megatron", "--tokenizer", "tok", "--output", str(output), "--", *(GPT + REST).split()])
    assert "unknown: --my-own\n" in capsys.readouterr().out
    config = load_config(output)
    assert (config.model.family, config.tokenizer.path, config.training.precision) == ("gpt2", "tok", "fp32")
    assert config.name == "x" and str(config.directory) == "runs/x"
    before = output.read_text()
    with pytest.raises(ConfigError, match="is not written"):
        main(["--from-megatron", "--force", "--output", str(output), "--", *f"{GPT}{REST} --hidden-size 63".split()])
    assert output.read_text() == before, "what --force would have replaced"


def test_the_scripts_deepspeed_json_is_taken_over(tmp_path, capsys):
    for name, accepted in (("good", {"stage": 2}), ("bad", {"stage": 7})):
        file, output = tmp_path / f"{name}.json", tmp_path / f"{name}.yaml"
        file.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": accepted}))
        words = f"{GPT}{REST} --zero-stage 1 --deepspeed --deepspeed_config {file}".split()
        main(["--from-megatron", "--output", str(output), "--", *words])
        refused = "note: pretrain will refuse DeepSpeed's JSON" in capsys.readouterr().out
        assert (load_config(output).deepspeed, refused) == (str(file), name == "bad")


@pytest.mark.parametrize(
    ("values", "arguments", "expected"),
    [
        ({"train_batch_size": 96, "fp16": {"enabled": True, "initial_scale_power": 11}, "gradient_clipping": 0.0},
         "", (96, 11, 0.0)),
        ({"train_batch_size": "auto", "fp16": {"enabled": True}}, "", (4, 16, 1.0)),
        ({"fp16": {"enabled": "auto"}}, "--fp16 --global-batch-size 8 --initial-loss-scale 4096", (8, 12, 1.0)),
    ],
)  # fmt: skip
def test_values_of_the_deepspeed_json_go_for_arguments_that_are_not_given(
    values, arguments, expected, tmp_path, capsys
):
    file, output = tmp_path / "of script.json", tmp_path / "x.yaml"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}} | values))
    main(["--from-megatron", "--output", str(output), "--", *f"{GPT}{REST} {arguments} --deepspeed_config".split(),
          str(file)])  # fmt: skip
    training = (config := load_config(output)).training
    found = (training.global_batch_size, training.initial_loss_scale_power, config.optimizer.gradient_clipping)
    assert (found, training.precision) == (expected, "fp16")
    assert "will refuse" not in capsys.readouterr().out


@pytest.mark.parametrize(("stage", "noted"), [(2, True), (1, False)])
def test_a_zero_stage_that_the_deepspeed_json_does_not_have_is_noted(stage, noted, tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    words = f"{GPT}{REST} --zero-stage {stage} --deepspeed_config {file}".split()
    main(["--from-megatron", "--output", str(tmp_path / "x.yaml"), "--", *words])
    note = f"note: --zero-stage {stage}: not taken; {file} decides, and has stage 1"
    assert (note in capsys.readouterr().out) == noted


def test_arguments_that_are_not_utf8_are_written_and_printed_as_escapes(tmp_path):
    output = tmp_path / "x.yaml"
    words = [b"--output", bytes(output), b"--", *(GPT + REST).encode().split(), b"--seed", b"1", b"\xff", b"--\xff"]
    command = [sys.executable, "-m", "ctxlm_ds.cli", "init", "--from-megatron", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "utf-8"})
    assert (done.returncode, done.stderr) == (0, "") and r"unknown: --\udcff" in done.stdout
    assert load_config(output).training.seed == 1


def test_a_recipe_that_is_not_valid_is_not_written_and_names_the_argument(tmp_path):
    output = tmp_path / "x.yaml"
    with pytest.raises(ConfigError) as caught:
        words = f"{GPT}{REST} --hidden_dropout 1.5 --hidden-size 63"
        main(["--from-megatron", "--output", str(output), "--", *words.split()])
    text = str(caught.value)
    assert f"{output} is not written" in text and "x.yaml:" not in text.partition("\n")[2] and not output.exists()
    assert "[--hidden_dropout 1.5]" in text
    output = tmp_path / "y.yaml"
    with pytest.raises(ConfigError, match=r"\[--hidden-size 63\]|\[--num-attention-heads 4\]"):
        file = tmp_path / "arguments.txt"
        file.write_text(f"{GPT}{REST} --hidden-size 63")
        main(["--from-megatron", str(file), "--output", str(output)])
    with pytest.raises(ConfigError, match="in a FILE or after --"):
        main(["--from-megatron"])


def test_slurm_scripts_are_copied(tmp_path, capsys):
    main(["--slurm", str(tmp_path / "slurm")])
    assert (tmp_path / "slurm" / "pretrain.sbatch").is_file()
    assert {path.name for path in (tmp_path / "slurm" / "profiles").iterdir()} == {"cpu.sh", "gpu-h100.sh"}
    assert f"next: cd {tmp_path} && ctxlm submit RECIPE.yaml" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"folder named slurm; give .*jobs/slurm"):
        main(["--slurm", str(tmp_path / "jobs")])
    with pytest.raises(ConfigError, match="exists"):
        main(["--slurm", str(tmp_path / "slurm")])
