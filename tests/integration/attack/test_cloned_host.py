"""The disk of a host is copied, with its key and its records, and boots on another host."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
from builders import a_spec, a_tar, chunks_of, digest_of
from click.testing import CliRunner

from agent.api import ImageFormat, TaskState, TaskStatus
from agent.client import AgentClient
from agent.identity.identity import HostIdentity
from control_plane.cli.root import main
from tests.ports import free_port
from wire.errors import Busy, Conflict, Forbidden, Unreachable

from .target_process import USER, Target, running
from .test_identity_ends import ctl, joins
from .test_revoked_agent import agent_in, answering

pytestmark = pytest.mark.behaviour("F-89")

T = TypeVar("T")
DATA = a_tar(app="code")
WEB = a_spec(image=digest_of(DATA), offline_restart=True)


@pytest.fixture
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A control plane with its own hosts."""
    with running("control plane", tmp_path_factory.mktemp("cloned")) as target:
        yield target


def on(folder: Path, ask: Callable[[AgentClient], Awaitable[T]]) -> T:
    """Send a request to the agent of a host on the agent's socket."""

    async def call() -> T:
        async with AgentClient(f"unix:{folder / 'cp.sock'}") as client:
            return await ask(client)

    return asyncio.run(call())


def task(folder: Path) -> TaskStatus | None:
    """Return the state of the task on a host; None while its agent does not answer."""
    with suppress(Unreachable, Busy):
        return on(folder, lambda client: client.get_task("web"))
    return None


def runs(folder: Path) -> bool:
    """Return whether the task runs on a host."""
    found = task(folder)
    return found is not None and found.state is TaskState.RUNNING


def waits(folder: Path, why: str) -> bool:
    """Return whether the task is not started on a host for this reason."""
    found = task(folder)
    return found is not None and found.state is TaskState.ACCEPTED and why in found.reason


def is_tried(folder: Path) -> bool:
    """Return whether a host starts the task, or tries to: the clone's image is missing."""
    found = task(folder)
    return found is not None and found.state in (TaskState.BACKOFF, TaskState.RUNNING)


async def _gives(client: AgentClient) -> None:
    await client.put_image(WEB.image, ImageFormat.TAR, chunks_of(DATA))
    await client.put_task("web", WEB)


def serves(folder: Path) -> bool:
    """Return whether an agent is ready."""
    with suppress(Unreachable, Busy):
        return on(folder, lambda client: client.readyz()).ok
    return False


def joined(target: Target, machine: str, port: int, folder: Path) -> None:
    """Let a host join with the state in a folder."""
    joins(target, machine, f"{USER}:{port}")
    there = folder / "state/identity"
    there.mkdir(parents=True, exist_ok=True)
    shutil.copy(target.folder / machine / "identity.json", there)
    (there / "second-host").unlink(missing_ok=True)


def copied(target: Target, original: Path) -> Path:
    """Copy the disk of a host, without the content of its memory.

    Only the process of a machine in memory knows its subvolumes, so a clone has no images.
    """
    copy = target.folder / "copy"
    passing = shutil.ignore_patterns(".*.new", ".new.*", ".*.json.*")  # files that are staged
    shutil.copytree(original / "state", copy / "state", symlinks=True, ignore=passing)
    return copy


@pytest.mark.behaviour("F-89")
def test_a_cloned_host_starts_nothing_and_the_original_continues(
    control_plane: Target,
) -> None:
    """The clone is detected by the marks of two answering processes; then an operator resolves it.

    The clone has a task that starts again after a boot. The original's task runs throughout in the
    same process; the original's agent is restarted and queried again in between.
    """
    target, original = control_plane, control_plane.folder / "original"
    port, other_port = free_port(USER), free_port(USER)
    joined(target, "vm1", port, original)
    with agent_in(original, port):
        target.until(lambda: serves(original) and answering(target, "vm1"), "vm1 does not answer")
        on(original, _gives)
        target.until(lambda: runs(original), "the task does not run")
        before = task(original)
        copy = copied(target, original)
        with agent_in(copy, other_port, boots=1):
            target.until(
                lambda: waits(copy, "another host has the identity of vm1"), "not reported"
            )
            with pytest.raises(Conflict, match="starts no tasks"):
                on(copy, lambda client: client.put_task("other", WEB))
            (found,) = json.loads(ctl(target, "machine", "duplicates", "--output", "json"))[
                "duplicates"
            ]
            assert (found["machine"], found["address"]) == ("vm1", USER)
            assert "a clone has its identity" in ctl(target, "machine", "list")
            assert found["boot_id"][:8] in ctl(target, "machine", "show", "vm1")
            assert "duplicate_identity" in ctl(target, "audit", "--object", "machine/vm1")
            host = HostIdentity(copy / "state/identity")
            host.boot_id = found["boot_id"]
            with pytest.raises(Forbidden, match="another host has the identity of vm1"):
                asyncio.run(host.renew())
        after = task(original)
        assert before is not None
        assert after is not None
        assert (after.state, after.invocation_id) == (before.state, before.invocation_id)
        assert answering(target, "vm1"), "the control plane continues with it"

        # again, with the control plane's answer on its disk
        with agent_in(copy, other_port, boots=2):
            target.until(lambda: waits(copy, "another host has the identity of vm1"), "not held")
        joined(target, "vm2", other_port, copy)
        with agent_in(copy, other_port, boots=3):
            target.until(lambda: answering(target, "vm2"), "it is no machine of its own")
            target.until(lambda: answering(target, "vm1"), "the first one does not answer")
            again = task(original)
            assert again is not None
            assert again.invocation_id == before.invocation_id
    ctl(target, "machine", "forget-duplicate", "vm1")
    assert "a clone has its identity" not in ctl(target, "machine", "list")
    assert "Traceback" not in target.log.read_text()


@pytest.mark.behaviour("F-89")
def test_the_clone_becomes_the_machine_after_the_original_is_removed(
    control_plane: Target,
) -> None:
    """An operator has to remove the original; its silence alone never suffices."""
    target, original = control_plane, control_plane.folder / "original"
    port, other_port = free_port(USER), free_port(USER)
    joined(target, "vm1", port, original)
    with agent_in(original, port):
        target.until(lambda: serves(original) and answering(target, "vm1"), "vm1 does not answer")
        on(original, _gives)
        target.until(lambda: runs(original), "the task does not run")
        copy = copied(target, original)
        with agent_in(copy, other_port, boots=1):
            target.until(
                lambda: waits(copy, "another host has the identity of vm1"), "not reported"
            )
    with agent_in(copy, other_port, boots=2):
        target.until(
            lambda: waits(copy, "another host has the identity of vm1"), "silence is enough"
        )
    ctl(target, "machine", "forget-duplicate", "vm1")
    with agent_in(copy, other_port, boots=2):
        target.until(lambda: is_tried(copy), "no host may start it any more")
    words = ["--endpoint", f"unix:{target.socket}", "machine", "forget-duplicate", "vm1"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 3, result.output
