"""The state folder on a real btrfs whose trees are full."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import FakeHost, a_spec, a_tar, chunks_of, digest_of, gone, running, unit
from on_btrfs import machine, mounted, use_real_programs

from agent.api import ImageFormat, TaskState
from wire.errors import HostError

pytestmark = [pytest.mark.root, pytest.mark.behaviour("F-34")]
DATA = a_tar(app="code")
DIGEST = digest_of(DATA)
INLINE_BYTES = 2000
"""A file of this size is stored in the tree itself (btrfs(5), max_inline: 2048)."""
STEP_BYTES = 1 << 20


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    """Yield a machine in memory whose state folder is on a btrfs with little room for trees."""
    with mounted(tmp_path, 256 << 20, "-m", "single", "-d", "single") as host:
        use_real_programs(host, "tar", "find")
        yield host


def _fill(folder: Path) -> int:
    """Allocate all of the disk to data, then fill the trees with inline files."""
    folder.mkdir()
    number = 0
    try:
        while True:
            number += 1
            with (folder / f"data{number}").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, STEP_BYTES)
    except OSError:
        pass
    files = refused = 0
    while refused < 2:
        try:
            with (folder / f"inline{files}").open("wb", buffering=0) as file:
                file.write(b"x" * INLINE_BYTES)
            files += 1
        except OSError:
            refused += 1
            os.sync()
    return files


def _remove_some(folder: Path) -> int:
    """Remove 500 files and make the kernel free their space; return the number of removed files."""
    some = sorted(folder.glob("inline*"))[:500]
    for file in some:
        file.unlink()
    os.sync()
    return len(some)


@pytest.mark.behaviour("F-34")
async def test_a_write_on_full_trees_is_refused_and_later_carried_out(
    host: FakeHost,
) -> None:
    """No record fits, so the agent accepts nothing. Tasks keep running, and fsck is clean.

    After some of the files are removed, the agent carries out the same requests.
    """
    async with host.agent(machine(host)) as client:
        await client.put_image(DIGEST, ImageFormat.TAR, chunks_of(DATA))
        for name in ("stays", "goes"):
            await client.put_task(name, a_spec(image=DIGEST))
            await running(client, name)
        before = await client.get_task("stays")
        while not (host.state / "reserve").exists():
            await client.get_machine()
        ballast = host.state / "ballast"
        filled = _fill(ballast)
        with pytest.raises(HostError, match="cannot save the record of task goes: No space left"):
            await client.delete_task("goes")
        with pytest.raises(HostError, match="cannot save the record of task new: No space left"):
            await client.put_task("new", a_spec(image=DIGEST))
        tasks = (await client.list_tasks()).tasks
        assert {(t.task_id, t.state) for t in tasks} == {
            ("stays", TaskState.RUNNING),
            ("goes", TaskState.RUNNING),
        }

    async with host.agent(machine(host)) as client:  # no crash loop
        again = await client.get_task("stays")
        assert (again.state, again.invocation_id) == (TaskState.RUNNING, before.invocation_id)
        removed = 0
        while True:
            removed += _remove_some(ballast)
            assert removed < filled
            with contextlib.suppress(HostError):
                await client.delete_task("goes")
                break
        await gone(client, "goes")
        assert host.units() == [unit("stays")]
        for file in ballast.iterdir():
            file.unlink()
        ballast.rmdir()
        os.sync()
    async with host.serving(machine(host)) as (services, client):
        services.accounts.recheck_s = 0.1
        assert [a for a in (await client.get_accounts()).accounts if a.wrong] == []
        assert (await client.get_machine()).problems == []
        await client.put_task("new", a_spec(image=DIGEST))
        await running(client, "new")
