"""An agent whose identity was revoked gets no more requests, on any connection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port

from .target_process import USER, Target, running
from .test_identity_ends import ctl, joins

pytestmark = pytest.mark.behaviour("BUG-HT5")

ESTABLISHED = "01"
"""State of a connection in /proc/net/tcp (Documentation/networking/proc_net_tcp.rst)."""


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A control plane with its own host."""
    with running("control plane", tmp_path_factory.mktemp("revoked")) as target:
        yield target


@contextmanager
def agent(target: Target, machine: str, port: int) -> Iterator[None]:
    """Run the agent of a host that has joined during the block."""
    folder = target.folder / f"{machine}-runs"
    held = target.folder / machine / "identity.json"
    there = folder / "state/identity/identity.json"
    there.parent.mkdir(parents=True, exist_ok=True)
    there.write_bytes(held.read_bytes())
    with agent_in(folder, port):
        yield


@contextmanager
def agent_in(
    folder: Path, port: int, boots: int = 0, program: str = "agent_process.py"
) -> Iterator[None]:
    """Run the agent of a host with the state in a folder, after this number of boots, during the
    block.
    """
    here = Path(__file__).parent
    with folder.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, str(here / program), str(folder), f"{USER}:{port}", str(boots)],
            env=os.environ | {"PYTHONPATH": str(here.parents[2])},
            stderr=log,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def answering(target: Target, machine: str) -> bool:
    """Return whether a machine's agent answers the control plane."""
    return bool(json.loads(ctl(target, "machine", "show", machine, "--output", "json"))["ready"])


def standing(port: int) -> int:
    """Return the number of established connections to a port of the loopback."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == ESTABLISHED for row in rows)


@pytest.mark.behaviour("BUG-HT5")
def test_a_revoked_agent_gets_no_more_requests(control_plane: Target) -> None:
    """Regression: the control plane used an open connection until the leaf certificate expired."""
    target, port = control_plane, free_port(USER)
    joins(target, "vm7", f"{USER}:{port}")
    with agent(target, "vm7", port):
        target.until(lambda: answering(target, "vm7"), "the agent does not answer")
        assert standing(port) >= 1
        ctl(target, "machine", "revoke-identity", "vm7")
        target.until(lambda: standing(port) == 0, "a connection stands")
        target.until(lambda: not answering(target, "vm7"), "the agent is still believed")
    revoked = target.log.read_text()
    assert "Traceback" not in revoked
    assert "Unclosed" not in revoked


@pytest.mark.behaviour("BUG-HT5")
def test_an_agent_that_joined_again_gets_requests_again(control_plane: Target) -> None:
    """Certificates are revoked, not the machine."""
    target, port = control_plane, free_port(USER)
    joins(target, "vm6", f"{USER}:{port}")
    with agent(target, "vm6", port):
        target.until(lambda: answering(target, "vm6"), "the agent does not answer")
        ctl(target, "machine", "revoke-identity", "vm6")
        revoked_at = time.time()
        target.until(lambda: not answering(target, "vm6"), "the agent is still believed")
    # validity of a certificate has a resolution of one second
    target.until(lambda: int(time.time()) > int(revoked_at))
    joins(target, "vm6", f"{USER}:{port}")
    with agent(target, "vm6", port):
        target.until(lambda: answering(target, "vm6"), "the agent is not believed again")
