"""On a disk that returns only errors, an unreadable object counts as neither damaged nor gone."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import IMAGE, FakeHost, a_record, a_spec, gone, running

from agent.api import ImagePull
from agent.client import AgentClient
from agent.host import metrics
from agent.identity import clone_check
from agent.runtime import disk
from agent.runtime.disk import StateDisk
from agent.runtime.events import HostEvents
from agent.runtime.journal import Journal
from agent.runtime.offload import Lanes
from agent.runtime.reserve import Reserve
from wire.errors import Conflict, HostError


def a_pull() -> ImagePull:
    return ImagePull(digest=IMAGE, path=f"/v1/images/{IMAGE}/stream")


def unreadable(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Make the listing of folders and the reading of files in them fail as on a bad disk."""
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


@pytest.mark.behaviour("F-35", "F-37")
async def test_an_agent_starts_on_a_disk_that_cannot_be_read_and_knows_its_tasks(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent exited with an error, repeatedly; a running task is known by its record's copy."""
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


@pytest.mark.behaviour("F-35")
async def test_an_image_whose_description_cannot_be_read_is_not_removed(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image was treated as damaged; the disk may recover."""
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


@pytest.mark.behaviour("F-35")
def test_an_agent_that_cannot_see_its_records_does_not_take_them_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without copies, after a boot, the agent would remove the objects of its tasks (P1)."""
    journal = Journal(tmp_path / "journal", None, tmp_path / "copies")
    unreadable(monkeypatch, tmp_path / "journal")
    with pytest.raises(HostError, match="cannot list the records"):
        journal.replay()


@pytest.mark.behaviour("BUG-AG44")
@pytest.mark.parametrize("durable", [True, False])
def test_a_record_takes_its_place_only_once_its_content_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """Otherwise a flush of another record keeps the new name, and a power cut the old size."""
    flushed, fsync, replace = set[int](), os.fsync, os.replace

    def noted(fd: int) -> None:
        flushed.add(os.fstat(fd).st_ino)
        fsync(fd)

    def checked(source: Path, target: Path) -> None:
        assert source.stat().st_ino in flushed
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", checked)
    journal = Journal(tmp_path / "journal")
    journal.save(a_record(), durable=durable)
    assert journal.replay().tasks == {"web": a_record()}


@pytest.mark.behaviour("BUG-AG85")
async def test_a_disk_that_fills_up_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check of a nearly full disk made an error in the log and an event."""
    events = HostEvents("boot")
    state = StateDisk(tmp_path, events, Reserve(tmp_path / "reserve", lambda _: None), Lanes())
    before, shown = events.latest, []
    for free in (1 << 30, 90 << 20, 80 << 20, 900 << 10, 0, 1 << 30):
        size = SimpleNamespace(f_flag=0, f_bavail=free, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda _, size=size: size)
        await state.check()
        shown.append(state.problem.partition(": ")[0].rpartition("has ")[2])

    assert events.latest - before == 2
    assert shown == ["", "90MiB left", "80MiB left", "900KiB left", "0B left", ""]


@pytest.mark.behaviour("BUG-AG96")
async def test_a_disk_that_does_not_answer_is_a_problem_and_read_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop itself waited for the disk, and the agent answered no request."""
    answers, asked = threading.Event(), list[object]()
    events = HostEvents("boot")
    state = StateDisk(tmp_path, events, Reserve(tmp_path / "reserve", lambda _: None), Lanes())
    statvfs = os.statvfs

    def hangs(path: Path) -> os.statvfs_result:
        asked.append(path)
        assert answers.wait(60)
        return statvfs(path)

    monkeypatch.setattr(os, "statvfs", hangs)
    monkeypatch.setattr(disk, "ANSWER_S", 0.01)
    before = events.latest
    await state.check()
    await state.check()

    assert "does not answer" in state.problem
    assert (len(asked), events.latest - before) == (1, 1)

    answers.set()
    monkeypatch.setattr(disk, "ANSWER_S", 60.0)
    await state.check()

    assert state.problem == ""
    assert (len(asked), events.latest - before) == (1, 2)


@pytest.mark.behaviour("BUG-AG96", "BUG-AG112")
@pytest.mark.parametrize(
    ("part", "read", "ask"),
    [
        ("images", "all", lambda client: client.list_images()),
        ("images", "get", lambda client: client.get_image(IMAGE)),
        ("images", "_find_and_touch", lambda client: client.pull_image(a_pull())),
        ("profile", "_reported", lambda client: client.get_profile()),
    ],
)
async def test_requests_are_answered_while_another_one_waits_for_the_disk(
    host: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    read: str,
    ask: Callable[[AgentClient], Coroutine[None, None, object]],
) -> None:
    begun, answers = threading.Event(), threading.Event()

    async with host.serving() as (services, client):
        owner = getattr(services, part)
        reads = getattr(owner, read)

        def hangs(*args: object) -> object:
            begun.set()
            assert answers.wait(60)
            return reads(*args)

        monkeypatch.setattr(owner, read, hangs)
        waiting = asyncio.create_task(ask(client))
        await asyncio.to_thread(begun.wait, 60)

        assert await client.list_tasks()
        assert not waiting.done()

        answers.set()
        assert await waiting


@pytest.mark.behaviour("BUG-AG119")
@pytest.mark.parametrize(
    ("call", "ask"),
    [
        ("stat", lambda client: client.put_task("web", a_spec())),
        ("read_bytes", lambda client: client.delete_image(IMAGE)),
        ("unlink", lambda client: client.delete_image(IMAGE)),
    ],
)
async def test_requests_are_answered_while_a_change_waits_for_files_of_images(
    host: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    ask: Callable[[AgentClient], Coroutine[None, None, object]],
) -> None:
    begun, answers, original = threading.Event(), threading.Event(), getattr(Path, call)

    def hangs(path: Path, *args: Any, **options: Any) -> object:
        if path.parent == host.state / "images":
            begun.set()
            assert answers.wait(10)
        return original(path, *args, **options)

    async with host.agent() as client:
        monkeypatch.setattr(Path, call, hangs)
        waiting = asyncio.create_task(ask(client))
        await asyncio.to_thread(begun.wait, 60)

        assert await client.list_tasks()
        assert not waiting.done()

        answers.set()
        await waiting


@pytest.mark.behaviour("BUG-AG119")
async def test_an_image_is_not_removed_while_its_first_task_is_admitted(host: FakeHost) -> None:
    """The admission reads the image in a thread, so a removal may begin before the record."""
    async with host.serving() as (services, client):
        async with asyncio.timeout(60), services.tasks._creating:
            putting = asyncio.create_task(client.put_task("web", a_spec()))
            while not services.tasks.tasks_using(IMAGE):
                await asyncio.sleep(0.01)
            with pytest.raises(Conflict, match="is used by 1 tasks: web"):
                await client.delete_image(IMAGE)
        await putting
        await running(client, "web")
        await client.delete_task("web")
        await gone(client, "web")
        await client.delete_image(IMAGE)


@pytest.mark.behaviour("BUG-AG119")
async def test_a_layer_that_a_pull_has_just_found_is_not_removed(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull would wait for a layer that it does not fetch. The disk may hang meanwhile."""
    begun, answers = threading.Event(), threading.Event()

    def hangs(_blobs: object) -> list[str]:
        begun.set()
        assert answers.wait(10)
        return ["sha256:c0"]

    async with host.serving() as (services, _):
        layers = services.images.layers
        monkeypatch.setattr(layers, "present_chains", hangs)

        async def pull(found: asyncio.Event, end: asyncio.Event) -> None:
            with layers.holding() as hold:
                async with layers.fetch_turn(["sha256:b0"], lambda _: None, hold):
                    found.set()
                    await end.wait()

        pulling = asyncio.create_task(pull(found := asyncio.Event(), end := asyncio.Event()))
        await asyncio.to_thread(begun.wait, 60)
        removing = asyncio.create_task(layers.discard("sha256:c0"))
        answers.set()
        async with asyncio.timeout(60):
            await found.wait()
        assert not await removing
        end.set()
        await pulling
        assert await layers.discard("sha256:c0")


@pytest.mark.behaviour("BUG-AG96")
async def test_the_last_facts_are_shown_with_the_problem_while_the_disk_hangs(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, statvfs, free_bytes = threading.Event(), os.statvfs, host.fake.btrfs.free_bytes

    def hangs(path: Path) -> os.statvfs_result:
        assert answers.wait(60)
        return statvfs(path)

    def free(path: Path) -> tuple[int, int]:
        assert answers.wait(60)
        return free_bytes(path)

    monkeypatch.setattr(disk, "ANSWER_S", 0.01)
    monkeypatch.setattr(disk, "CHECK_S", 0.01)
    async with host.agent() as client:
        before = await client.get_machine()
        monkeypatch.setattr(host.fake.btrfs, "free_bytes", free)
        monkeypatch.setattr(os, "statvfs", hangs)
        events = await client.get_events(0)
        while not any("does not answer" in event.message for event in events.events):
            events = await client.get_events(events.latest, wait_s=30)

        found = await client.get_machine()

        assert found.disk_free_bytes == before.disk_free_bytes
        assert any("does not answer" in problem for problem in found.problems)
        answers.set()


@pytest.mark.behaviour("BUG-AG87")
@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"{}"])
async def test_an_agent_whose_identity_is_damaged_manages_its_tasks(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """It ended with the exit code of a wrong configuration, and systemd did not restart it."""
    file = host.state / "identity" / "identity.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    monkeypatch.setattr(clone_check, "FIRST_S", 0.0)
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        await running(client, "web")
        problems = (await client.get_machine()).problems
    assert [problem.partition(":")[0] for problem in problems] == [
        f"{file} is not a valid credential"
    ]


@pytest.mark.behaviour("BUG-AG106")
async def test_metrics_are_scraped_while_the_disk_hangs(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scrape counted the images on the disk, and waited for it without a limit."""
    answers = threading.Event()

    async with host.serving() as (services, _):
        assert b"twine_images 1.0" in await services.metrics.scrape(ready=True)
        listed, read_all = asyncio.Event(), services.images.all

        def hangs() -> object:
            listed.set()
            assert answers.wait(60)
            return read_all()

        monkeypatch.setattr(services.images, "all", hangs)
        monkeypatch.setattr(metrics, "ANSWER_S", 0.01)
        for _ in range(2):
            assert b"twine_images 1.0" in await services.metrics.scrape(ready=True)
        assert listed.is_set()
        answers.set()


@pytest.mark.behaviour("BUG-AG109")
async def test_a_disk_that_hangs_while_the_reserve_is_filled_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check of the disk was made before the reserve was filled."""
    answers, reserve = threading.Event(), Reserve(tmp_path / "reserve", lambda _: None)
    statvfs, hangs_now = os.statvfs, threading.Event()

    def hangs(*args: Path) -> os.statvfs_result | None:
        hangs_now.set()
        assert answers.wait(60)
        return statvfs(*args) if args else None

    def read(path: Path) -> os.statvfs_result:
        result = hangs(path) if hangs_now.is_set() else statvfs(path)
        assert result is not None
        return result

    monkeypatch.setattr(os, "statvfs", read)
    monkeypatch.setattr(reserve, "fill", hangs)
    monkeypatch.setattr(disk, "ANSWER_S", 0.01)
    monkeypatch.setattr(disk, "CHECK_S", 0.01)
    state = StateDisk(tmp_path, HostEvents("boot"), reserve, lanes := Lanes())
    watching = asyncio.create_task(state.watch())
    try:
        async with asyncio.timeout(60):
            while not state.is_hung:
                await asyncio.sleep(0.01)
    finally:
        watching.cancel()
        answers.set()
        await asyncio.gather(watching, return_exceptions=True)
        lanes.close()
    assert "does not answer" in state.problem
