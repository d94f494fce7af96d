"""An agent whose identity was revoked is told nothing more, on no connection."""

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

from .face import USER, Face, running
from .test_identity import ctl, joins

pytestmark = pytest.mark.behaviour("BUG-HT5")

ESTABLISHED = "01"
"""Of a connection, in /proc/net/tcp (Documentation/networking/proc_net_tcp.rst)."""


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Face]:
    """A control plane with a host of its own."""
    with running("control plane", tmp_path_factory.mktemp("revoked")) as face:
        yield face


@contextmanager
def agent(face: Face, machine: str, port: int) -> Iterator[None]:
    """Run the agent of a host that has joined, until left."""
    folder = face.folder / f"{machine}-runs"
    held = face.folder / machine / "identity.json"
    there = folder / "state/identity/identity.json"
    there.parent.mkdir(parents=True, exist_ok=True)
    there.write_bytes(held.read_bytes())
    with agent_in(folder, port):
        yield


@contextmanager
def agent_in(
    folder: Path, port: int, boots: int = 0, program: str = "an_agent.py"
) -> Iterator[None]:
    """Run the agent of a host whose state is in a folder, after so many boots, until left."""
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


def answering(face: Face, machine: str) -> bool:
    """Return whether the control plane hears a machine's agent."""
    return bool(json.loads(ctl(face, "machine", "show", machine, "--output", "json"))["ready"])


def standing(port: int) -> int:
    """Return how many connections to a port of the loopback stand."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == ESTABLISHED for row in rows)


@pytest.mark.behaviour("BUG-HT5")
def test_a_revoked_agent_gets_no_more_requests(control_plane: Face) -> None:
    """The control plane went on with a connection that stood, until the leaf ended."""
    face, port = control_plane, free_port(USER)
    joins(face, "vm7", f"{USER}:{port}")
    with agent(face, "vm7", port):
        face.until(lambda: answering(face, "vm7"), "the agent is not heard")
        assert standing(port) >= 1
        ctl(face, "machine", "revoke-identity", "vm7")
        face.until(lambda: standing(port) == 0, "a connection stands")
        face.until(lambda: not answering(face, "vm7"), "the agent is still believed")
    revoked = face.log.read_text()
    assert "Traceback" not in revoked
    assert "Unclosed" not in revoked


@pytest.mark.behaviour("BUG-HT5")
def test_an_agent_that_joined_again_gets_requests_again(control_plane: Face) -> None:
    """A revocation is of certificates, not of the machine."""
    face, port = control_plane, free_port(USER)
    joins(face, "vm6", f"{USER}:{port}")
    with agent(face, "vm6", port):
        face.until(lambda: answering(face, "vm6"), "the agent is not heard")
        ctl(face, "machine", "revoke-identity", "vm6")
        revoked_at = time.time()
        face.until(lambda: not answering(face, "vm6"), "the agent is still believed")
    face.until(lambda: int(time.time()) > int(revoked_at))  # a certificate counts in seconds
    joins(face, "vm6", f"{USER}:{port}")
    with agent(face, "vm6", port):
        face.until(lambda: answering(face, "vm6"), "the agent is not believed again")
