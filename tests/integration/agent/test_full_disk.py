"""The state folder on a real btrfs that is full of data."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import IMAGE, FakeHost, a_spec, a_tar, chunks_of, digest_of, gone, running, unit
from on_btrfs import machine, mounted, use_real_programs
from on_btrfs import run as run_program

from agent.api import ImageFormat, TaskState
from agent.machine.btrfs import HostBtrfs
from wire.errors import TwineError

pytestmark = [pytest.mark.root, pytest.mark.behaviour("F-33")]
DATA = a_tar(app="code")
DIGEST = digest_of(DATA)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    """Yield a machine in memory whose state folder is on a separate small btrfs."""
    with mounted(tmp_path, size=256 << 20) as host:
        use_real_programs(host, "tar", "find")
        yield host


def _fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "big").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * (1 << 20))
    os.sync()


@pytest.mark.behaviour("F-33")
async def test_on_a_full_disk_tasks_run_on_and_can_still_be_stopped(host: FakeHost) -> None:
    """The agent accepts no new task, keeps running tasks and removes deleted ones."""
    async with host.agent(machine(host)) as client:
        await client.put_image(DIGEST, ImageFormat.TAR, chunks_of(DATA))
        for name in ("stays", "goes"):
            await client.put_task(name, a_spec(image=DIGEST))
            await running(client, name)
        before = await client.get_task("stays")
        while not (host.state / "reserve").exists():
            await client.get_machine()
        ballast = host.state / "ballast"
        ballast.mkdir()
        _fill(ballast)

        with pytest.raises(TwineError, match=r"does not fit"):
            await client.put_image(IMAGE, ImageFormat.TAR, chunks_of(b"x" * 4096))
        await client.delete_task("goes")
        await gone(client, "goes")
        assert host.units() == [unit("stays")]

    async with host.serving(machine(host)) as (_, client):  # no crash loop
        again = await client.get_task("stays")
        assert (again.state, again.invocation_id) == (TaskState.RUNNING, before.invocation_id)
        reported = (await client.get_machine()).problems
        assert ["left: images are refused" in problem for problem in reported] == [True]
        await client.delete_task("stays")
        await gone(client, "stays")
        for file in ballast.iterdir():
            file.unlink()
        ballast.rmdir()
    os.sync()  # only now is there room again
    async with host.serving(machine(host)) as (services, client):
        services.accounts.recheck_s = 0.1
        assert [a for a in (await client.get_accounts()).accounts if a.wrong] == []
        assert (await client.get_machine()).problems == []
        await client.put_task("new", a_spec(image=DIGEST))
        await running(client, "new")


@pytest.mark.behaviour("F-39")
def test_room_of_deleted_tasks_is_not_promised_before_cleanup(host: FakeHost) -> None:
    """The kernel frees a deleted subvolume after some time; until then the space is in use."""
    run_program("mount", "-o", "remount,commit=300", str(host.state))
    btrfs, big, size = HostBtrfs(), host.state / "big", 64 << 20
    btrfs.create(big)
    (big / "file").write_bytes(os.urandom(size))
    os.sync()
    _, before = btrfs.free_bytes(host.state)

    btrfs.delete(big)
    assert not big.exists()
    assert btrfs.free_bytes(host.state)[1] < before + size // 2
    # commit the deletion, wait for the cleaning, commit again
    for what in ("filesystem", "subvolume", "filesystem"):
        run_program("btrfs", what, "sync", str(host.state))
    assert btrfs.free_bytes(host.state)[1] > before + size // 2
