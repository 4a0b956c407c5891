"""`ctxlm check` and `ctxlm submit`: what sbatch is told (a stand-in writes it down; tests/slurm has the real one)."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from ctxlm_ds.apps.cluster import submit
from ctxlm_ds.apps.cluster.job import refuse_run_of_another
from ctxlm_ds.apps.cluster.rank_start import begin
from ctxlm_ds.apps.plan import check_run
from ctxlm_ds.checkpoint.folders import step_name
from ctxlm_ds.checkpoint.manifest import hash_files, write_manifest
from ctxlm_ds.errors import CheckpointError, ConfigError
from ctxlm_ds.recipe.load import dump_config, load_config
from ctxlm_ds.tokenizers.load import load_tokenizer
from ctxlm_ds.tokenizers.train import train_tokenizer
from tests.sample_data import random_documents, write_dataset
from tests.text import make_documents

SBATCH = """#!/bin/sh
[ -z "$REFUSED" ] || { echo "sbatch: error: $REFUSED" >&2; exit 1; }
[ "$1" != --test-only ] || { echo "sbatch: Job 1 to start at noon" >&2; exit; }
for word in "$CTXLM_ENV" "$@"; do printf '%s\\n' "$word"; done > told
echo "12;cluster"
"""

FORGOTTEN = "#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2\nexit 1\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, its data, a profile, and a command sbatch."""
    tokenizer = train_tokenizer("wordpiece", make_documents(60, seed=1), 300, tmp_path / "tok")
    metadata = {"tokenizer_fingerprint": tokenizer.fingerprint}
    write_dataset(tmp_path / "text", random_documents(20, vocab_size=tokenizer.vocab_size), metadata=metadata)
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nmodel: {hidden_size: 32, num_layers: 2, num_attention_heads: 2, intermediate_size: 64}\n"
        "tokenizer: {path: tok}\ndata: {train: [text], seq_length: 32}\n"
        "training: {global_batch_size: 8, micro_batch_size: 1, max_steps: 4}\n"
    )
    (tmp_path / "slurm" / "profiles").mkdir(parents=True)
    for name in ("pretrain.sbatch", "env.sh"):
        (tmp_path / "slurm" / name).write_text("##SBATCH --partition=no\n")
    profile = "#SBATCH --partition=gpu --account='a b'  # ours\n#SBATCH --gpus-per-node=h100:4\nmodule load cuda\n"
    (tmp_path / "slurm" / "profiles" / "big.sh").write_text(profile)
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", SBATCH), ("scontrol", FORGOTTEN)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    # In place of a process of its own, which builds the model.
    monkeypatch.setattr(
        "ctxlm_ds.apps.plan.check_run.planned_model", lambda config, *_: [f"vocabulary {config.model.vocab_size}"]
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    for name in ("CTXLM_HOME", "CTXLM_ENV", "REFUSED"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def told(words: str) -> list[str]:
    submit.main(shlex.split(words))
    return Path("told").read_text().splitlines()


def test_a_job_has_the_name_and_the_log_of_its_run(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = told("mine.yaml --nodes 2 --deepspeed_config zero2 --set run_dir=runs/a training.max_steps=5 --time=90")
    assert words == [
        f"{site}/slurm/env.sh", "--parsable", "--job-name=a", "--output=runs/a/slurm-%j.log", "--nodes=2",
        "--ntasks-per-node=1", "--time=90", f"{site}/slurm/pretrain.sbatch", "mine.yaml", "--deepspeed_config",
        "zero2", "--set", "run_dir=runs/a", "training.max_steps=5",
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "the recipe is valid for 2 ranks" in printed and "ZeRO stage 2" in printed and "data: found" in printed
    assert "job 12: a, 2 nodes x 1 rank; log: runs/a/slurm-12.log" in printed and Path("runs/a").is_dir()


def test_a_profile_comes_before_the_command_line(site: Path) -> None:
    words = told("mine.yaml --profile big --account=c --nodes 2")
    assert words[0] == f"{site}/slurm/profiles/big.sh"
    assert words[4:10] == [
        "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=h100:4", "--partition=gpu", "--account=a b", "--account=c"
    ]  # fmt: skip
    assert "--ntasks-per-node=2" in told("mine.yaml --profile slurm/profiles/big.sh --ranks 2")
    with pytest.raises(ConfigError, match="there are: big"):
        submit.main(["mine.yaml", "--profile", "bgi"])


def test_a_damaged_profile_is_refused_with_its_line(site: Path) -> None:
    profile = site / "slurm" / "profiles" / "big.sh"
    profile.write_text("#SBATCH --partition=gpu\n#SBATCH --account='a b\n")
    with pytest.raises(ConfigError, match=r"big.sh: #SBATCH --account='a b: No closing quotation"):
        submit.main(["mine.yaml", "--profile", "big"])
    profile.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match=r"big.sh: cannot be read as UTF-8"):
        submit.main(["mine.yaml", "--profile", "big"])


def test_sbatch_and_the_shell_take_the_run_directory_as_it_is(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = told("mine.yaml --set 'run_dir=runs/50%j; a'")
    assert "--output=runs/50%%j; a/slurm-%j.log" in words
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: watch")]
    shown = subprocess.run(["sh", "-c", f"watch() {{ shift 2; sh -c \"printf '<%s>' $*\"; }}; {line[6:]}"],
                           capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert shown == "<ctxlm><status><runs/50%j; a>"


def test_a_sweep_is_an_array_of_runs(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "lr.txt").write_text("optimizer.learning_rate=1e-4\noptimizer.learning_rate=2e-4\n")
    words = told("mine.yaml --sweep lr.txt --array=0-1%1")
    assert words[2:7] == [
        "--job-name=mine", "--output=runs/mine/%a/slurm-%A.log", "--nodes=1", "--ntasks-per-node=1", "--array=0-1%1"
    ]  # fmt: skip
    assert words[7:] == [f"{site}/slurm/pretrain.sbatch", "mine.yaml", "--sweep", "runs/mine/sweep.txt"]
    assert Path("runs/mine/1").is_dir() and "next: watch -n 60 ctxlm status runs/mine\n" in capsys.readouterr().out
    assert told("mine.yaml --sweep lr.txt --array=0-1%1") == words, "to resume"
    assert told("mine.yaml --sweep lr.txt")[6] == "--array=0-1"
    (site / "lr.txt").write_text("optimizer.learning_rate=3e-4\n")
    with pytest.raises(ConfigError, match=r"runs/mine/sweep.txt has other settings"):
        submit.main(["mine.yaml", "--sweep", "lr.txt"])
    (site / "lr.txt").write_text("optimizer.learning_rate=1e-4\noptimizer.lerning_rate=2e-4\n")
    with pytest.raises(ConfigError, match=r"lerning_rate.*\[lr.txt:2\]"):
        submit.main(["mine.yaml", "--sweep", "lr.txt"])
    (site / "lr.txt").write_text("# rates\n\nextends=bert-base\n")
    with pytest.raises(ConfigError, match=r"lr.txt:3: extends=bert-base: `extends` is for"):
        submit.main(["mine.yaml", "--sweep", "lr.txt"])


def checkpoint(run_dir: Path, step: int) -> None:
    """A checkpoint of the run of mine.yaml, as the check compares it."""
    folder = run_dir / "checkpoints" / step_name(step)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(load_config("mine.yaml", ["model.vocab_size=300"])))
    write_manifest(folder, step, hash_files(folder, ["config.yaml"]))


def test_a_run_goes_on_or_is_complete(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(Path("runs/mine"), 2)
    told("mine.yaml")
    assert "  resumes at step 2 of 4\n" in capsys.readouterr().out
    Path("told").unlink()
    submit.main(["mine.yaml", "--set", "training.max_steps=2"])
    assert "complete already: step 2 of 2" in (printed := capsys.readouterr().out) and "not queued" in printed
    submit.check_main(["mine.yaml", "--set", "training.max_steps=2"])
    assert "complete already: step 2 of 2" in capsys.readouterr().out
    for main in (submit.main, submit.check_main):
        with pytest.raises(CheckpointError, match="training.seed: 1234 -> 9"):
            main(["mine.yaml", "--set", "training.seed=9"])
    check_run.check_only(check_run.parse_arguments(["--config", "mine.yaml", "--check"]))
    assert "  resumes at step 2 of 4\n" in capsys.readouterr().out and not Path("told").exists()


def test_a_run_of_another_job_is_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(Path("runs/mine"), "job-18-0-0", "18", "n1")
    (site / "bin" / "scontrol").write_text("#!/bin/sh\necho JobId=$3 JobName=a; echo JobState=RUNNING\n")
    for main in (submit.main, submit.check_main):
        with pytest.raises(ConfigError, match="runs/mine is the run of job 18, which is running. Wait until it ends"):
            main(["mine.yaml"])
        assert capsys.readouterr().out == "", "before the checks that take long"
    assert not Path("told").exists()
    told("mine.yaml --dependency=afterany:18")
    assert "warning: runs/mine is the run of job 18" in capsys.readouterr().out
    (site / "bin" / "scontrol").write_text("#!/bin/sh\necho JobId=$3 JobName=a; echo JobState=COMPLETED\n")
    told("mine.yaml")


def test_a_queued_job_that_has_not_begun_has_its_run(site: Path) -> None:
    told("mine.yaml")
    (site / "bin" / "scontrol").write_text("#!/bin/sh\necho JobId=$3 JobName=a; echo JobState=PENDING\n")
    with pytest.raises(ConfigError, match="runs/mine is the run of job 12, which is pending"):
        submit.main(["mine.yaml"])
    refuse_run_of_another(Path("runs/mine"), "11")  # a job that begins has its run, whatever waits behind it
    (site / "lr.txt").write_text("optimizer.learning_rate=1e-4\ntraining.seed=5\noptimizer.eps=1e-7\n")
    sweep = ["mine.yaml", "--sweep", "lr.txt", "--set", "run_dir=runs/lr"]
    submit.main([*sweep, "--array=0,2%1"])
    with pytest.raises(ConfigError, match="runs/lr/0 is the run of job 12_0"):
        submit.main(sweep)
    submit.main([*sweep, "--array", "1"])
    with pytest.raises(ConfigError, match="--array=x: expected numbers"):
        submit.main([*sweep, "--array=x"])
    with pytest.raises(ConfigError, match="none of these tasks"):
        submit.main([*sweep, "--array=3"])
    checkpoint(Path("runs/mine"), 4)
    with pytest.raises(ConfigError, match="runs/mine is the run of job 12"):  # complete, and to be extended
        submit.main(["mine.yaml", "--set", "training.max_steps=9"])


def test_each_task_of_a_sweep_goes_on(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "lr.txt").write_text("optimizer.learning_rate=1e-4\ntraining.seed=5\n")
    checkpoint(Path("runs/mine/0"), 4)
    told("mine.yaml --sweep lr.txt")
    printed = capsys.readouterr().out
    assert "  complete already: step 4 of 4\n" in printed and "  2 tasks: 1 complete already, 0 to resume" in printed
    checkpoint(Path("runs/mine/1"), 4)
    with pytest.raises(CheckpointError, match=r"runs/mine/1/.* cannot be continued"):
        submit.main(["mine.yaml", "--sweep", "lr.txt"])


def test_a_changed_sweep_is_told_although_its_runs_are_complete(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "lr.txt").write_text("optimizer.learning_rate=1e-4\n")
    told("mine.yaml --sweep lr.txt")
    checkpoint(Path("runs/mine/0"), 4)
    submit.main(["mine.yaml", "--sweep", "lr.txt"])
    assert "not queued, there is nothing to train" in capsys.readouterr().out
    (site / "lr.txt").write_text("optimizer.learning_rate=3e-4\n")
    for main in (submit.main, submit.check_main):
        with pytest.raises(ConfigError, match=r"runs/mine/sweep.txt has other settings than lr.txt"):
            main(["mine.yaml", "--sweep", "lr.txt"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mine.yaml --nodes 3", "not a multiple of"),
        ("mine.yaml --set data.train=[gone]", r"gone\.idx"),
        ("mine.yaml --set optimizer.name=x", "optimizer.name"),
        ("mine.yaml --deepspeed_config zero9", "zero9"),
    ],
)
def test_a_mistake_is_told_before_anything_is_written(site: Path, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        told(words)
    assert not Path("told").exists() and not Path("runs").exists()


def test_what_sbatch_refuses_is_told_before_the_checks_that_take_long(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REFUSED", "invalid partition specified")
    for main in (submit.main, submit.check_main):
        with pytest.raises(ConfigError, match="invalid partition specified"):
            main(["mine.yaml", "--partition=gup", "--set", "data.train=[gone]"])
    assert not Path("told").exists() and not Path("runs").exists() and capsys.readouterr().out == ""


def test_a_check_submits_nothing(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit.check_main(["mine.yaml"])
    assert capsys.readouterr().out.endswith("\n  sbatch: to start at noon\n")
    assert not Path("told").exists() and not Path("runs").exists()
    (site / "bin" / "sbatch").unlink()
    monkeypatch.setenv("PATH", f"{site}/bin")
    submit.check_main(["mine.yaml"])
    assert "sbatch: not asked" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="submit on a login node"):
        submit.main(["mine.yaml"])


def test_the_vocabulary_is_that_of_the_tokenizer(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = load_tokenizer("tok").output_size
    submit.check_main(["mine.yaml"])
    assert f"vocabulary {size}\n" in capsys.readouterr().out
    check_run.check_only(check_run.parse_arguments(["--config", "mine.yaml", "--check", "--set", "tokenizer.path=no"]))
    assert "vocabulary None\n" in capsys.readouterr().out


def test_the_scripts_are_those_of_the_folder_or_the_checkout(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert submit.scripts_folder() == site / "slurm"
    monkeypatch.chdir(site / "bin")
    assert submit.scripts_folder() == Path(submit.__file__).parents[3] / "slurm"
    monkeypatch.setattr(submit, "checkout", lambda: None)
    with pytest.raises(ConfigError, match="ctxlm init --slurm slurm"):
        submit.scripts_folder()
