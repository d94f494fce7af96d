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

from .target_process import USER, Target, running
from .test_authority_rotates import credential
from .test_cloned_host import joined, on, runs, serves, task
from .test_identity_ends import ctl
from .test_revoked_agent import agent_in, answering

pytestmark = pytest.mark.behaviour("F-88")

DATA = a_tar(app="code")
WEB = a_spec(image=digest_of(DATA))


@pytest.fixture
def control_plane(tmp_path: Path) -> Iterator[Target]:
    """A control plane with its own hosts."""
    with running("control plane", tmp_path / "plane") as target:
        yield target


async def _gives(client: AgentClient) -> None:
    await client.put_image(WEB.image, ImageFormat.TAR, chunks_of(DATA))
    await client.put_task("web", WEB)


def starts(target: Target) -> subprocess.CompletedProcess[str]:
    """Start a control plane that is expected to exit, because it cannot use its files."""
    argv = [sys.executable, "-m", "control_plane.daemon", "serve"]
    argv += ["--state", str(target.folder / "state"), "--listen", f"{USER}:0"]
    argv += ["--socket", str(target.socket)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)


def again(target: Target) -> None:
    """Start the control plane again at its old port."""
    argv = [sys.executable, "-m", "control_plane.daemon", "serve"]
    argv += ["--state", str(target.folder / "state"), "--listen", f"{USER}:{target.port}"]
    argv += ["--socket", str(target.socket)]
    with target.log.open("ab") as log:
        target.process = subprocess.Popen(argv, stderr=log)
    target.until(lambda: b"serving at" in target.log.read_bytes().rpartition(b"@@@")[2], "not up")


def ends(target: Target) -> None:
    """Kill the control plane, and begin a new part of its log."""
    target.end()
    with target.log.open("ab") as log:
        log.write(b"@@@\n")


@pytest.mark.behaviour("F-88")
def test_a_file_that_is_lost_under_a_control_plane_is_written_again(
    control_plane: Target,
) -> None:
    """The process still has the key in memory; hosts renew. `abandon` writes the file again."""
    target, port = control_plane, free_port(USER)
    folder = target.folder / "host"
    joined(target, "vm1", port, folder)
    path = target.folder / "state/authority.pem"
    before = path.read_bytes()
    path.unlink()
    with agent_in(folder, port):
        target.until(lambda: answering(target, "vm1"), "vm1 does not answer")
        held = tls.load(folder / "state/identity/identity.json")
        ctl(target, "authority", "prepare")
        target.until(
            lambda: tls.load(folder / "state/identity/identity.json").issued_at > held.issued_at,
            "vm1 does not renew",
        )
        ctl(target, "authority", "abandon")
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.behaviour("F-88")
def test_a_lost_key_stops_no_task_and_hosts_join_again(control_plane: Target) -> None:
    """A new authority is made only on command; then the steps of docs/security.md are followed.

    The task's process is the same throughout: its agent is restarted only at the very end.
    """
    target, port = control_plane, free_port(USER)
    folder = target.folder / "host"
    joined(target, "vm1", port, folder)
    path = target.folder / "state/authority.pem"
    with agent_in(folder, port):
        target.until(lambda: serves(folder) and answering(target, "vm1"), "vm1 does not answer")
        on(folder, _gives)
        target.until(lambda: runs(folder), "the task does not run")
        before = task(folder)
        old = credential(target, "ann")
        ends(target)

        kept = path.read_bytes()
        for damage in (None, b"", kept[: len(kept) // 2]):
            path.unlink(missing_ok=True)
            if damage is not None:
                path.write_bytes(damage)
            refused = starts(target)
            assert refused.returncode == 78, refused.stderr
            assert "twine-control-plane new-authority" in refused.stderr
            assert "Traceback" not in refused.stderr
            assert (path.read_bytes() if damage is not None else None) == damage

        path.write_bytes(kept)  # with a backup
        again(target)
        target.until(lambda: answering(target, "vm1"), "vm1 does not answer with the backup")
        ends(target)

        path.write_bytes(b"damaged")  # without a backup
        state = ["--state", str(target.folder / "state")]
        done = CliRunner().invoke(daemon, ["new-authority", "--yes", *state])
        assert done.exit_code == 0, done.output
        assert "1 hosts have to join again" in done.output
        assert "twinectl token create --host vm1" in done.output
        assert path.with_name("authority.pem.lost").read_bytes() == b"damaged"
        again(target)
        assert path.read_bytes() != kept
        for _ in range(20):  # two identities that do not trust each other
            assert not answering(target, "vm1")
            time.sleep(0.1)
        held = tls.load(old)
        with pytest.raises((OSError, AssertionError)):
            _whoami(old)
        assert held.ca_pem not in path.read_text()
        after = task(folder)
        assert before is not None
        assert after is not None
        assert (after.state, after.invocation_id) == (TaskState.RUNNING, before.invocation_id)

    joined(target, "vm1", port, folder)
    with agent_in(folder, port):
        target.until(lambda: answering(target, "vm1"), "vm1 does not answer after it joined again")
    shown = json.loads(ctl(target, "machine", "show", "vm1", "--output", "json"))
    assert shown["record"]["machine"] == "vm1"
    _whoami(credential(target, "bob"))


def _whoami(file: Path) -> None:
    from control_plane.cli.root import main

    result = CliRunner().invoke(main, ["--credential", str(file), "whoami"])
    assert result.exit_code == 0, result.output
