"""The authority's key is lost: what continues, what is refused, and how to recover."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import a_spec, a_tar, chunks_of, digest_of
from click.testing import CliRunner

from agent.api import ImageFormat, TaskState
from agent.client import AgentClient
from control_plane.daemon import main as daemon
from tests.ports import free_port
from wire import tls

from .face import USER, Face, running
from .test_authority_rotates import credential
from .test_cloned_host import joined, on, runs, serves, task
from .test_identity_ends import ctl
from .test_revoked_agent import agent_in, answering

pytestmark = pytest.mark.behaviour("F-88")

DATA = a_tar(app="code")
WEB = a_spec(image=digest_of(DATA))


@pytest.fixture
def control_plane(tmp_path: Path) -> Iterator[Face]:
    """A control plane with its own hosts."""
    with running("control plane", tmp_path / "plane") as face:
        yield face


async def _gives(client: AgentClient) -> None:
    await client.put_image(WEB.image, ImageFormat.TAR, chunks_of(DATA))
    await client.put_task("web", WEB)


def starts(face: Face) -> subprocess.CompletedProcess[str]:
    """Start a control plane that is expected to exit, because it cannot use its files."""
    argv = [sys.executable, "-m", "control_plane.daemon", "serve"]
    argv += ["--state", str(face.folder / "state"), "--listen", f"{USER}:0"]
    argv += ["--socket", str(face.socket)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


def again(face: Face) -> None:
    """Start the control plane again at its old port."""
    argv = [sys.executable, "-m", "control_plane.daemon", "serve"]
    argv += ["--state", str(face.folder / "state"), "--listen", f"{USER}:{face.port}"]
    argv += ["--socket", str(face.socket)]
    with face.log.open("ab") as log:
        face.process = subprocess.Popen(argv, stderr=log)
    face.until(lambda: b"serving at" in face.log.read_bytes().rpartition(b"@@@")[2], "not up")


def ends(face: Face) -> None:
    """Kill the control plane, and begin a new part of its log."""
    face.end()
    with face.log.open("ab") as log:
        log.write(b"@@@\n")


@pytest.mark.behaviour("F-88")
def test_a_file_that_is_lost_under_a_control_plane_is_written_again(control_plane: Face) -> None:
    """The process still has the key in memory; hosts renew. `abandon` writes the file again."""
    face, port = control_plane, free_port(USER)
    folder = face.folder / "host"
    joined(face, "vm1", port, folder)
    path = face.folder / "state/authority.pem"
    before = path.read_bytes()
    path.unlink()
    with agent_in(folder, port):
        face.until(lambda: answering(face, "vm1"), "vm1 does not answer")
        held = tls.load(folder / "state/identity/identity.json")
        ctl(face, "authority", "prepare")
        face.until(
            lambda: tls.load(folder / "state/identity/identity.json").issued_at > held.issued_at,
            "vm1 does not renew",
        )
        ctl(face, "authority", "abandon")
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.behaviour("F-88")
def test_a_lost_key_stops_no_task_and_hosts_join_again(control_plane: Face) -> None:
    """A new authority is made only on command; then the steps of docs/security.md are followed.

    The task's process is the same throughout: its agent is restarted only at the very end.
    """
    face, port = control_plane, free_port(USER)
    folder = face.folder / "host"
    joined(face, "vm1", port, folder)
    path = face.folder / "state/authority.pem"
    with agent_in(folder, port):
        face.until(lambda: serves(folder) and answering(face, "vm1"), "vm1 does not answer")
        on(folder, _gives)
        face.until(lambda: runs(folder), "the task does not run")
        before = task(folder)
        old = credential(face, "ann")
        ends(face)

        kept = path.read_bytes()
        for damage in (None, b"", kept[: len(kept) // 2]):
            path.unlink(missing_ok=True)
            if damage is not None:
                path.write_bytes(damage)
            refused = starts(face)
            assert refused.returncode == 78, refused.stderr
            assert "twine-control-plane new-authority" in refused.stderr
            assert "Traceback" not in refused.stderr
            assert (path.read_bytes() if damage is not None else None) == damage

        path.write_bytes(kept)  # with a backup
        again(face)
        face.until(lambda: answering(face, "vm1"), "vm1 does not answer with the backup")
        ends(face)

        path.write_bytes(b"damaged")  # without a backup
        state = ["--state", str(face.folder / "state")]
        done = CliRunner().invoke(daemon, ["new-authority", "--yes", *state])
        assert done.exit_code == 0, done.output
        assert "1 hosts have to join again" in done.output
        assert "twinectl token create --host vm1" in done.output
        assert path.with_name("authority.pem.lost").read_bytes() == b"damaged"
        again(face)
        assert path.read_bytes() != kept
        for _ in range(20):  # two identities that do not trust each other
            assert not answering(face, "vm1")
            time.sleep(0.1)
        held = tls.load(old)
        with pytest.raises((OSError, AssertionError)):
            _whoami(old)
        assert held.ca_pem not in path.read_text()
        after = task(folder)
        assert before is not None
        assert after is not None
        assert (after.state, after.invocation_id) == (TaskState.RUNNING, before.invocation_id)

    joined(face, "vm1", port, folder)
    with agent_in(folder, port):
        face.until(lambda: answering(face, "vm1"), "vm1 does not answer after it joined again")
    shown = json.loads(ctl(face, "machine", "show", "vm1", "--output", "json"))
    assert shown["record"]["machine"] == "vm1"
    _whoami(credential(face, "bob"))


def _whoami(file: Path) -> None:
    from control_plane.cli.root import main

    result = CliRunner().invoke(main, ["--credential", str(file), "whoami"])
    assert result.exit_code == 0, result.output
