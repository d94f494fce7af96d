"""Images are added and removed through the agent's own API."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from builders import IMAGE, FakeHost, a_spec, a_tar, chunks_of, digest_of, running

from agent.api import ImageFormat, ImagePull
from agent.images import images
from agent.images.images import HostImages
from agent.machine import Property
from agent.machine.fake_programs import ends_with
from wire.errors import (
    BtrfsError,
    Conflict,
    HostError,
    NotFound,
    TwineError,
    Unprocessable,
    Unreachable,
)

DATA = a_tar(app="code", lib="dependencies")
DIGEST = digest_of(DATA)
TAR = ImageFormat.TAR


def _folder(host: FakeHost, digest: str = DIGEST) -> Path:
    return host.state / "images" / digest.removeprefix("sha256:")


def _nothing_stays(host: FakeHost, digest: str = DIGEST) -> None:
    assert list((host.state / "staging").iterdir()) == []
    assert not _folder(host, digest).exists()
    assert host.fake.systemd.units("twine-unpack-*") == []


@pytest.mark.behaviour("AG3")
async def test_an_image_is_streamed_in_verified_and_read_only(host: FakeHost) -> None:
    async with host.agent() as client:
        info = await client.put_image(DIGEST, TAR, chunks_of(DATA))
        listed = (await client.list_images()).images

    assert (info.stream_bytes, info in listed) == (len(DATA), True)
    assert (_folder(host) / "lib").read_text() == "dependencies"
    subvolume = host.fake.btrfs.find(_folder(host))
    assert subvolume
    assert subvolume.read_only
    assert host.fake.systemd.units("twine-unpack-*") == []


@pytest.mark.behaviour("AG3")
async def test_a_task_can_use_an_image_whose_archive_has_no_entry_for_its_top(
    host: FakeHost,
) -> None:
    """With the agent's umask only its owner could enter the folder, and no task started from it."""
    before = os.umask(0o077)
    try:
        async with host.agent() as client:
            await client.put_image(DIGEST, TAR, chunks_of(DATA))
    finally:
        os.umask(before)

    assert _folder(host).stat().st_mode & 0o777 == 0o755


@pytest.mark.behaviour("F-29", "F-30")
@pytest.mark.parametrize("sent", [DATA[:-1], DATA + b"x", b"", bytes([DATA[0] ^ 1]) + DATA[1:]])
async def test_a_stream_with_another_digest_is_refused_whole(host: FakeHost, sent: bytes) -> None:
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match="has digest"):
            await client.put_image(DIGEST, TAR, chunks_of(sent))
        _nothing_stays(host)
        await client.put_image(DIGEST, TAR, chunks_of(DATA))


@pytest.mark.behaviour("F-29")
async def test_a_stream_that_breaks_off_leaves_nothing(host: FakeHost) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield DATA[:5000]
        raise Unreachable("the sender is gone")

    async with host.serving() as (services, client):
        with pytest.raises(TwineError):
            await client.put_image(DIGEST, TAR, broken())
        with pytest.raises(Unreachable):
            await services.images.receive(DIGEST, TAR, broken())
    _nothing_stays(host)


async def test_data_that_is_not_an_archive_is_refused(host: FakeHost) -> None:
    data = b"this is no archive" * 100
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match="cannot be unpacked as tar"):
            await client.put_image(digest_of(data), TAR, chunks_of(data))
    _nothing_stays(host, digest_of(data))


async def test_the_same_image_twice_at_once_is_taken_in_once(host: FakeHost) -> None:
    async with host.agent() as client:
        infos = await asyncio.gather(
            *(client.put_image(DIGEST, TAR, chunks_of(DATA)) for _ in range(3))
        )

    assert infos[0] == infos[1] == infos[2]
    assert len(host.fake.systemd.started) == 1


@pytest.mark.behaviour("F-40")
async def test_an_image_in_use_is_not_deleted(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec())
        with pytest.raises(Conflict, match="web"):
            await client.delete_image(IMAGE)
        await running(client, "web")
        assert (await client.get_image(IMAGE)).tasks == ["web"]


async def test_an_unused_image_can_be_deleted(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.delete_image(IMAGE)
        with pytest.raises(NotFound):
            await client.get_image(IMAGE)
        with pytest.raises(NotFound):
            await client.delete_image(IMAGE)
    assert not _folder(host, IMAGE).exists()


@pytest.mark.behaviour("F-40")
async def test_a_delete_never_takes_the_image_of_a_task_that_is_just_put(host: FakeHost) -> None:
    async with host.agent() as client:
        for n in range(10):
            digest = host.give_image(f"sha256:{n:064x}")
            put, deleted = await asyncio.gather(
                client.put_task(f"t{n}", a_spec(image=digest)),
                client.delete_image(digest),
                return_exceptions=True,
            )
            if isinstance(put, BaseException):
                assert isinstance(put, Unprocessable)
                assert deleted is None
            else:
                assert isinstance(deleted, Conflict)
                await running(client, f"t{n}")
                await client.delete_task(f"t{n}")


@pytest.mark.behaviour("F-33")
async def test_an_image_is_refused_before_the_disk_is_full(host: FakeHost) -> None:
    host.fake.btrfs.available_bytes = 100 << 20
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match="does not fit"):
            await client.put_image(DIGEST, TAR, chunks_of(DATA))
    _nothing_stays(host)


@pytest.mark.behaviour("BUG-AG9", "F-33")
async def test_an_unpacking_that_fills_the_disk_is_stopped(host: FakeHost) -> None:
    """10 MB of zeros filled the host; then it could not even record a stop."""

    def a_bomb(_argv: list[str], _properties: Mapping[str, Property]) -> None:
        host.fake.btrfs.available_bytes = 90 << 20  # and it would continue

    host.fake.systemd.programs["tar"] = a_bomb
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match="unpacking it left 90 MiB"):
            await client.put_image(DIGEST, TAR, chunks_of(DATA))
    _nothing_stays(host)


@pytest.mark.behaviour("BUG-AG6", "F-29", "BUG-AG15")
async def test_a_stalled_stream_does_not_block_the_image(host: FakeHost) -> None:
    """Its digest was blocked until the agent was restarted."""

    async def stalls() -> AsyncIterator[bytes]:
        yield DATA[:5000]
        await asyncio.Event().wait()

    async with host.serving() as (services, client):
        services.images.idle_s = 0.05
        with pytest.raises(Unreachable, match=r"stalled: no data for 0\.05 s"):
            await services.images.receive(DIGEST, TAR, stalls())
        _nothing_stays(host)
        services.images.idle_s = 60.0
        await client.put_image(DIGEST, TAR, chunks_of(DATA))
        gc.collect()
        locks = len(services.images._locks)

    assert locks == 0  # they stayed until a restart


async def test_an_image_is_synced_to_disk_before_and_after_it_is_complete(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not leave a complete image whose files are empty."""
    record = _folder(host).with_suffix(".json")
    stream = host.state / "staging" / f"{DIGEST[7:]}.stream"
    synced = list[tuple[str, bool, bool]]()

    def notes(what: str) -> Callable[[Path], None]:
        return lambda _: synced.append((what, stream.exists(), record.exists()))

    monkeypatch.setattr(host.fake.btrfs, "sync", notes("files"))
    monkeypatch.setattr(images, "sync_folder", notes("names"))
    async with host.agent() as client:
        await client.put_image(DIGEST, TAR, chunks_of(DATA))

    # The stream is deleted by then, so it need not be written at all.
    assert synced == [("files", False, False), ("names", False, True)]


@pytest.mark.behaviour("F-33", "F-35")
async def test_an_error_of_the_disk_is_no_bug_of_ours(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    async with host.agent() as client:
        with monkeypatch.context() as patch:
            patch.setattr(HostImages, "_flush", fails)
            with pytest.raises(HostError, match="Input/output error"):
                await client.put_image(DIGEST, TAR, chunks_of(DATA))
        _nothing_stays(host)


async def test_a_cancelled_transfer_stops_its_unpacking(host: FakeHost) -> None:
    host.fake.systemd.programs["tar"] = lambda _argv, _properties: None  # never ends
    async with host.serving() as (services, client):
        start = (await client.get_events(0)).latest
        receiving = asyncio.create_task(services.images.receive(DIGEST, TAR, chunks_of(DATA)))
        while not host.fake.systemd.units("twine-unpack-*"):
            await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait({receiving})
        assert (await client.get_events(start)).events == []
    _nothing_stays(host)


async def test_unpacking_left_over_from_a_killed_agent_is_not_taken_for_a_success(
    host: FakeHost,
) -> None:
    name = DIGEST.removeprefix("sha256:")
    left = f"twine-unpack-{name[:12]}.service"
    host.fake.systemd.programs["gone"] = ends_with(0)
    properties = {"ExecStart": [["gone"]], "RemainAfterExit": True, "CollectMode": "inactive"}
    host.fake.systemd.start_transient(left, properties)
    async with host.agent() as client:
        assert host.fake.systemd.units("twine-unpack-*") == []
        host.fake.systemd.start_transient(left, properties)
        await client.put_image(DIGEST, TAR, chunks_of(DATA))

    assert (_folder(host) / "app").read_text() == "code"


@pytest.mark.behaviour("F-42")
async def test_leftovers_of_every_kind_are_tidied_at_the_start(host: FakeHost) -> None:
    staging, images = host.state / "staging", host.state / "images"
    staging.mkdir()
    (staging / "x.stream").write_bytes(b"half")
    host.fake.btrfs.create(staging / "x")
    (staging / "y").mkdir()
    host.fake.btrfs.create(staging / "y" / "received")
    host.fake.btrfs.create(images / "incomplete")
    (images / ".z.new").write_bytes(b"half")
    (images / f"{'4' * 64}.json").write_bytes(b"garbage")
    host.fake.btrfs.create(images / ("4" * 64))
    (images / f"{'5' * 64}.json").write_bytes((images / f"{'1' * 64}.json").read_bytes())
    async with host.agent() as client:
        held = (await client.list_images()).images

    assert [i.digest for i in held] == [IMAGE]
    assert list(staging.iterdir()) == []
    assert sorted(p.name for p in images.iterdir()) == ["1" * 64, f"{'1' * 64}.json"]


async def test_an_image_can_be_put_again_after_a_removal_that_failed_half_way(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host.agent() as client:
        await client.put_image(DIGEST, TAR, chunks_of(DATA))

        def fails(_: Path) -> None:
            raise BtrfsError("cannot delete: busy")

        with monkeypatch.context() as patch:
            patch.setattr(host.fake.btrfs, "delete", fails)
            with pytest.raises(HostError, match="busy"):
                await client.delete_image(DIGEST)
        await client.put_image(DIGEST, TAR, chunks_of(DATA))

    assert (_folder(host) / "app").read_text() == "code"


async def test_a_host_that_joined_no_control_plane_pulls_nothing(host: FakeHost) -> None:
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match="joined no control plane"):
            await client.pull_image(ImagePull(digest=DIGEST, path="/v1/images"))
        assert (await client.pull_image(ImagePull(digest=IMAGE, path="/x"))).digest == IMAGE
