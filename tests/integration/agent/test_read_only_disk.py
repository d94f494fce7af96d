"""The state folder on a real btrfs that the kernel has turned read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import IMAGE, FakeHost, a_spec, a_tar, chunks_of, digest_of, gone, running
from msgspec.structs import replace

from agent.api import ImageFormat, TaskState
from agent.machine import HostAccess
from agent.machine.btrfs import HostBtrfs
from agent.runtime.core.records import Tombstone
from agent.runtime.journal import Journal
from wire.errors import HostError

pytestmark = [pytest.mark.root, pytest.mark.behaviour("F-37")]
DATA = a_tar(app="code")
DIGEST = digest_of(DATA)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=60)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    """Yield a machine in memory whose state folder is on a separate btrfs."""
    host = FakeHost(tmp_path)
    host.state.mkdir()
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(512 << 20)
    _run("mkfs.btrfs", "-q", str(image))
    _run("mount", "-o", "loop", str(image), str(host.state))
    try:
        yield host
    finally:
        _run("umount", str(host.state))


def _machine(host: FakeHost) -> HostAccess:
    return replace(host.fake.machine, btrfs=HostBtrfs())


def _leave_things_behind(host: FakeHost) -> None:
    """Create every kind of leftover that a dying agent can leave and a start removes."""
    staging, journal = host.state / "staging", host.state / "journal"
    (staging / "x.stream").write_bytes(b"half")
    HostBtrfs().create(staging / "x")
    (host.state / "images" / ".y.new").write_bytes(b"half")
    (journal / ".z.new").write_bytes(b"half")
    Journal(journal).save(Tombstone(task_id="old", generation=1, epoch=0, at=1.0))


@pytest.mark.behaviour("BUG-AG8", "F-37")
async def test_an_agent_on_a_read_only_disk_starts_reports_it_and_loses_nothing(
    host: FakeHost,
) -> None:
    """The agent crashed in a loop, and the health of all tasks was lost."""
    async with host.agent(_machine(host)) as client:
        await client.put_image(DIGEST, ImageFormat.TAR, chunks_of(DATA))
        await client.put_task("web", a_spec(image=DIGEST))
        before = await running(client, "web")
    _leave_things_behind(host)

    _run("mount", "-o", "remount,ro", str(host.state))
    async with host.agent(_machine(host)) as client:
        again = await client.get_task("web")
        reported = (await client.get_machine()).problems
        with pytest.raises(HostError, match="Read-only file system"):
            await client.put_task("other", a_spec(image=DIGEST))
        with pytest.raises(HostError, match="Read-only file system"):
            await client.delete_task("web")
        with pytest.raises(HostError, match="Read-only file system"):
            await client.put_image(IMAGE, ImageFormat.TAR, chunks_of(b"x"))
        tasks = (await client.list_tasks()).tasks

    assert (again.state, again.invocation_id) == (TaskState.RUNNING, before.invocation_id)
    assert [t.task_id for t in tasks] == ["web"]
    assert ["is read-only: tasks continue to run" in problem for problem in reported] == [True], (
        reported
    )

    _run("mount", "-o", "remount,rw", str(host.state))
    async with host.agent(_machine(host)) as client:
        assert (await client.get_task("web")).invocation_id == before.invocation_id
        await client.delete_task("web")
        await gone(client, "web")
        assert (await client.get_machine()).problems == []

    assert list((host.state / "staging").iterdir()) == []
