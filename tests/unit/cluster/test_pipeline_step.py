"""Inside a step's job: inputs complete, commands run in order, what came of it recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from ctxlm_ds.cluster.pipeline_outputs import DATASET, SAMPLES, TOKENIZER, Output, join_fingerprints
from ctxlm_ds.cluster.pipeline_step import command_words
from ctxlm_ds.cluster.pipeline_steps import Step
from ctxlm_ds.cluster.settings import JobSettings
from ctxlm_ds.recipe.pipeline_schema import StepResources
from tests.integration.route import wait_for
from tests.unit.cluster.pipelines import ROOT, record_json, run_step, shell_plan, shell_step


def test_a_step_runs_and_is_recorded(tmp_path: Path) -> None:
    plan = shell_plan(tmp_path, shell_step(tmp_path, "a", f"echo text > {tmp_path}/a"))
    status, said = run_step(plan, "a")
    assert status == 0 and f"+ echo text > {tmp_path}/a" in said
    record = record_json(plan, "a")
    assert (record["state"], record["job_id"], record["settings"]) == ("done", "7", dict(plan.steps[0].settings))
    assert record["content"] == join_fingerprints(plan.outputs("a"))


def test_each_job_of_an_array_has_its_own_record(tmp_path: Path) -> None:
    step = shell_step(tmp_path, "a", f"touch {tmp_path}/a-$SLURM_ARRAY_TASK_ID", jobs=2)
    plan = shell_plan(tmp_path, step)
    assert run_step(plan, "a", task=1)[0] == 0
    assert [path.name for path in sorted((tmp_path / "steps").iterdir())] == ["a.00001-of-00002.json", "a.order.json"]
    assert not (tmp_path / "a-0").exists()
    assert run_step(plan, "a", task=2)[0] == 2, "an array of another size"


def test_a_failure_ends_the_job_with_its_status(tmp_path: Path) -> None:
    first, second = "exit 7", f"touch {tmp_path}/never"
    step = Step("a", (first, second), {}, ((),), StepResources())
    plan = shell_plan(tmp_path, step)
    status, said = run_step(plan, "a")
    assert status == 7 and "ended with status 7: exit 7" in said
    assert (record_json(plan, "a")["state"], record_json(plan, "a")["exit_status"]) == ("failed", 7)
    assert not (tmp_path / "never").exists()


def test_status_0_without_the_output_is_a_failure(tmp_path: Path) -> None:
    plan = shell_plan(tmp_path, shell_step(tmp_path, "a", "true"))
    status, said = run_step(plan, "a")
    assert status == 2 and f"{tmp_path}/a is missing" in said
    assert record_json(plan, "a")["state"] == "failed"


def test_an_input_that_is_not_complete_stops_the_job(tmp_path: Path) -> None:
    """What a job that came too early would make must not be taken for the result."""
    first = shell_step(tmp_path, "a", f"touch {tmp_path}/a")
    plan = shell_plan(tmp_path, first, shell_step(tmp_path, "b", f"touch {tmp_path}/b", "a"))
    status, said = run_step(plan, "b")
    assert status == 2 and "b needs a, which is not complete" in said
    assert not (tmp_path / "b").exists() and not (tmp_path / "steps" / "b.json").exists()


def test_a_step_without_output_is_complete_by_its_record(tmp_path: Path) -> None:
    """What comes after it has nothing else to go by."""
    command = f"test -f {tmp_path}/allowed"
    evaluate = replace(shell_step(tmp_path, "evaluate", command), tasks=((),))
    plan = shell_plan(tmp_path, evaluate, shell_step(tmp_path, "last", f"touch {tmp_path}/last", "evaluate"))
    status, said = run_step(plan, "last")
    assert status == 2 and "last needs evaluate, which is not complete: it has not run" in said
    assert run_step(plan, "evaluate")[0] == 1
    status, said = run_step(plan, "last")
    assert status == 2 and f"which is not complete: ended with status 1: {command}" in said
    (tmp_path / "allowed").touch()
    assert run_step(plan, "evaluate")[0] == 0
    status, said = run_step(plan, "last")
    assert status == 0, said
    assert record_json(plan, "last")["needs"] == {"evaluate": "no outputs"}


def make_tokenizer(folder: Path) -> str:
    return f"mkdir {folder} && echo '{{}}' > {folder}/tokenizer.json"


def tokenizer_step(folder: Path, **settings: object) -> Step:
    tasks = ((Output(TOKENIZER, str(folder)),),)
    return Step("tokenizer", (make_tokenizer(folder),), settings, tasks, StepResources())


def test_what_others_made_is_not_taken_over(tmp_path: Path) -> None:
    plan = shell_plan(tmp_path, tokenizer_step(tmp_path / "tok"))
    subprocess.run(["bash", "-c", make_tokenizer(tmp_path / "tok")], check=True)
    status, said = run_step(plan, "tokenizer")
    assert status == 2 and "not made by this pipeline" in said


def test_a_job_killed_before_its_record_is_not_run_again(tmp_path: Path) -> None:
    """Where the tool would refuse what it has made (mkdir here), the pipeline must not ask it."""
    plan = shell_plan(tmp_path, tokenizer_step(tmp_path / "tok"))
    assert run_step(plan, "tokenizer")[0] == 0
    path = tmp_path / "steps" / "tokenizer.json"
    path.write_text(path.read_text().replace('"done"', '"begun"'))
    status, said = run_step(plan, "tokenizer")
    assert status == 0 and "made already by job 7" in said
    assert record_json(plan, "tokenizer")["state"] == "done"
    changed = shell_plan(tmp_path, tokenizer_step(tmp_path / "tok", vocab_size=9))
    path.write_text(path.read_text().replace('"done"', '"begun"'))
    assert run_step(changed, "tokenizer")[0] != 0, "made with other settings: the tool is asked, and refuses"


def test_a_signal_reaches_what_runs(tmp_path: Path) -> None:
    """Ahead of a time limit Slurm signals the batch script, which the runner has become."""
    script = f"trap 'echo stopped > {tmp_path}/a; exit 5' TERM; touch {tmp_path}/begun; while :; do sleep 0.05; done"
    plan = shell_plan(tmp_path, shell_step(tmp_path, "a", script))
    order = plan.order(plan.steps[0])
    order.write()
    words = [sys.executable, "-m", "ctxlm_ds.cluster.pipeline_step", str(order.path)]
    job = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "SLURM_JOB_ID": "7"}, stdout=subprocess.DEVNULL)
    try:
        wait_for((tmp_path / "begun").exists, 60, "the command's start")
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 5
    finally:
        job.kill()
        job.wait()
    assert (tmp_path / "a").read_text() == "stopped\n"
    assert record_json(plan, "a")["state"] == "failed"


def test_commands_run_in_the_container_of_the_cluster() -> None:
    line = "python tools/x.py --input 'a b'"
    plain = command_words(line, JobSettings())
    assert plain == ["bash", "-c", f"{sys.executable} tools/x.py --input 'a b'"]
    apptainer = command_words(line, JobSettings(container="i.sif", container_options=("--bind", "/s")))
    assert apptainer == ["apptainer", "exec", "--nv", "--bind", "/s", "i.sif", "bash", "-c",
                         "python3 tools/x.py --input 'a b'"]  # fmt: skip
    pyxis = command_words("echo python x", JobSettings(pyxis="i.sqsh"))
    assert pyxis[:4] == ["srun", "--nodes=1", "--ntasks=1", "--container-image=i.sqsh"]
    assert pyxis[-1] == "echo python x"


def test_a_fingerprint_goes_by_content(tmp_path: Path) -> None:
    prefix = tmp_path / "d"
    dataset = Output(DATASET, str(prefix))
    assert dataset.fingerprint() is None
    (tmp_path / "d.bin").write_bytes(b"12")
    (tmp_path / "d.idx").write_bytes(b"34")
    (tmp_path / "d.json").write_text('{"sha256": {"bin": "a", "idx": "b"}, "inputs": ["/here"]}')
    before = dataset.fingerprint()
    (tmp_path / "d.json").write_text('{"sha256": {"bin": "a", "idx": "b"}, "inputs": ["/there"]}')
    assert dataset.fingerprint() == before is not None
    (tmp_path / "d.bin").write_bytes(b"1")
    assert dataset.fingerprint() != before, "cut short"
    (tmp_path / "d.idx").unlink()
    assert dataset.fingerprint() is None and dataset.exists()


def test_samples_that_are_missing_are_not_taken_for_the_dataset(tmp_path: Path) -> None:
    facts = {"sample_format": "segment_pair", "seq_length": 128}
    missing = Output(SAMPLES, str(tmp_path / "d"), facts).missing()
    assert missing == (
        f"no sample index of {tmp_path}/d for these settings (sample_format segment_pair, seq_length 128)"
    )
    elsewhere = Output(SAMPLES, str(tmp_path / "d"), {"folder": "/x", **facts}).missing()
    assert elsewhere.startswith(f"no sample index of {tmp_path}/d in /x for these settings (sample_format ")
