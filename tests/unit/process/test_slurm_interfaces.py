"""The interface for gloo, in a network namespace whose host name is 127.0.1.1 as Debian writes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ctxlm_ds.process.slurm import VARIABLE, choose_gloo_interface, interface_of

ASK = (
    "import os; from ctxlm_ds.process.slurm import choose_gloo_interface as choose; "
    "print(choose(('n1', 'n2'), os.environ), os.environ.get('GLOO_SOCKET_IFNAME'))"
)


def on_a_node(tmp_path: Path, own_address: str) -> str:
    """The answer on a host n1 with an interface fab0, in namespaces of its own."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{own_address} n1\n10.9.8.2 n2\n")
    commands = [
        f"mount --bind {hosts} /etc/hosts", "hostname n1", "ip link set lo up",
        "ip link add fab0 type veth peer name fab1", "ip addr add 10.9.8.1/24 dev fab0", "ip link set fab0 up",
        "ip link set fab1 up", f'exec {sys.executable} -c "{ASK}"',
    ]  # fmt: skip
    words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", " && ".join(commands)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")
    return done.stdout.strip()


def test_a_name_that_leads_to_loopback_is_mended(tmp_path: Path) -> None:
    assert on_a_node(tmp_path, "127.0.1.1") == "fab0 fab0"


def test_a_name_that_leads_to_an_address_is_left_alone(tmp_path: Path) -> None:
    assert on_a_node(tmp_path, "10.9.8.1") == "None None"


def test_what_is_set_stands() -> None:
    environ = {VARIABLE: "ib0"}
    assert choose_gloo_interface(("n1", "n2"), environ) is None and environ == {VARIABLE: "ib0"}
    assert choose_gloo_interface(("n1",), {}) is None


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.1") is None
