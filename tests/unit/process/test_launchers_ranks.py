"""Ranks of `--ranks`: their variables, how they end, and what is refused; real processes that run small programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ctxlm_ds.errors import ConfigError
from ctxlm_ds.process.launchers import check_alone
from tests.unit.process.test_slurm import STEP

pytestmark = pytest.mark.dist
START = (
    "import sys; from ctxlm_ds.process.launchers import run_ranks; sys.exit(run_ranks(sys.argv[2:], int(sys.argv[1])))"
)


def launch(program: str, num_ranks: int = 3) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", START, str(num_ranks), sys.executable, "-c", program]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_every_rank_knows_its_place() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    process = launch(f"import os, sys; sys.stdout.write(' '.join(os.environ[name] for name in {names}) + chr(10))")
    out, err = process.communicate(timeout=60)
    places = sorted(line.split() for line in out.splitlines())
    assert [place[:5] for place in places] == [[str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)]
    assert len({place[5] for place in places}) == 1 and (err, process.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("sys.exit(7)", 7, ""), ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was ended by SIGKILL\n")],
)
def test_a_rank_that_fails_ends_the_others(end: str, status: int, said: str) -> None:
    program = f"import os, signal, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(60)"
    process, begin_s = launch(program), time.monotonic()
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (status, said)
    assert time.monotonic() - begin_s < 40


@pytest.mark.parametrize("status", [0, 143])
def test_a_signal_reaches_every_rank_and_the_launcher_waits(status: int, tmp_path: Path) -> None:
    """A rank that ends with the signal's status is not a failure that ends the slower one."""
    program = (
        "import os, pathlib, signal, sys, time\n"
        f"place = pathlib.Path({str(tmp_path)!r}) / os.environ['RANK']\n"
        "def stop(number, frame):\n"
        "    time.sleep(0.3 + 0.5 * int(os.environ['RANK']))\n"
        "    place.write_text(signal.Signals(number).name)\n"
        f"    sys.exit({status})\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "place.write_text('ready')\n"
        "time.sleep(60)"
    )
    process, end_s = launch(program, 2), time.monotonic() + 50
    while [path.read_text() for path in tmp_path.iterdir()] != ["ready", "ready"]:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)  # of a terminal, which ranks get themselves
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=50)
    assert process.returncode == status
    assert [path.read_text() for path in tmp_path.iterdir()] == ["SIGTERM", "SIGTERM"]


def test_a_second_ctrl_c_ends_a_rank_that_does_not_react(tmp_path: Path) -> None:
    """The rank that ends at once is a failure then, after which the other is killed."""
    program = (
        "import os, pathlib, signal, sys, time\n"
        f"place = pathlib.Path({str(tmp_path)!r}) / os.environ['RANK']\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "place.write_text('ready')\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(60)\n"
        "while not (place.parent / 'go').exists():\n    time.sleep(0.02)\n"
        "sys.exit(130)\n"
    )
    start = START.replace("import sys;", "import sys; import ctxlm_ds.process.launchers as ranks; ranks.GRACE_S = 1;")
    words = [sys.executable, "-c", start, "2", sys.executable, "-c", program]
    process, end_s = subprocess.Popen(words), time.monotonic() + 50
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < end_s
        time.sleep(0.05)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.2)
    (tmp_path / "go").touch()
    assert process.wait(20) == 130


def test_ranks_of_a_launcher_start_no_ranks() -> None:
    check_alone({"SLURM_JOB_ID": "1"})
    check_alone({**STEP, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"})
    with pytest.raises(ConfigError, match=r"RANK is set.*leave --ranks out"):
        check_alone({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="srun has started"):
        check_alone(STEP)
