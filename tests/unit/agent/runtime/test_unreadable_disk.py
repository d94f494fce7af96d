"""A disk that answers nothing but an error: what cannot be seen is neither damaged nor gone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from builders import IMAGE, FakeHost, a_spec, running

from agent.runtime.journal import Journal
from wire.errors import HostError


def unreadable(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Have the listing of folders, and the reading of files in them, fail as a bad disk does."""
    listdir, read_bytes = os.listdir, Path.read_bytes

    def fails(path: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def listed(path: str | Path = ".") -> list[str]:
        if Path(path) in folders:
            fails(path)
        return listdir(path)

    def read(path: Path) -> bytes:
        if path.parent in folders:
            fails(path)
        return read_bytes(path)

    monkeypatch.setattr(os, "listdir", listed)
    monkeypatch.setattr(Path, "read_bytes", read)


async def test_an_agent_starts_on_a_disk_that_cannot_be_read_and_knows_its_tasks(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-35 F-37: it ended with an error, again and again; a task that runs is known by its copy."""
    async with host.agent() as client:
        await client.put_task("web", a_spec(generation=7))
        before = await running(client, "web")
    folders = [host.state / name for name in ("staging", "images", "layers", "journal", "tasks")]
    with monkeypatch.context() as bad:
        unreadable(bad, *folders)
        async with host.agent() as client:
            found = await client.get_task("web")
            assert (found.generation, found.invocation_id) == (7, before.invocation_id)
            with pytest.raises(HostError, match="Input/output error"):
                await client.list_images()
    async with host.agent() as client:
        assert [image.digest for image in (await client.list_images()).images] == [IMAGE]
        assert (await client.get_task("web")).invocation_id == before.invocation_id


async def test_an_image_whose_description_cannot_be_read_is_not_removed(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-35: it was taken for damaged; the disk may answer again."""
    images = host.state / "images"
    with monkeypatch.context() as bad:
        read_bytes = Path.read_bytes

        def read(path: Path) -> bytes:
            if path.parent == images:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return read_bytes(path)

        bad.setattr(Path, "read_bytes", read)
        async with host.agent():
            pass
    async with host.agent() as client:
        assert [image.digest for image in (await client.list_images()).images] == [IMAGE]


def test_an_agent_that_cannot_see_its_records_does_not_take_them_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F-35 P1: without copies, after a boot, it would remove what belongs to its tasks."""
    journal = Journal(tmp_path / "journal", None, tmp_path / "copies")
    unreadable(monkeypatch, tmp_path / "journal")
    with pytest.raises(HostError, match="cannot list the records"):
        journal.replay()
