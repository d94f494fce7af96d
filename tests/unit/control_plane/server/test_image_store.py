"""Images appear completely or not at all, whatever happens during the upload."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pytest_mock import MockerFixture

from agent.api import ImageFormat, ImageSignature
from control_plane.images.store import ImageStore
from wire import signatures
from wire.errors import (
    Conflict,
    Forbidden,
    HostError,
    InvalidInput,
    NotFound,
    TooLarge,
    Unprocessable,
)

DATA = os.urandom(3 << 20)
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


async def chunks(data: bytes, size: int = 70_000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def cut_off(data: bytes) -> AsyncIterator[bytes]:
    yield data[: len(data) // 2]
    raise InvalidInput("the request body ended early")


def a_store(folder: Path, max_bytes: int = 8 << 20) -> ImageStore:
    return ImageStore(folder, lambda: 1000.0, max_bytes)


def files(folder: Path) -> set[str]:
    return {p.suffix or p.name for p in folder.rglob("*") if p.is_file()}


def test_encoded_values_are_decoded_unchanged(tmp_path: Path) -> None:
    async def round_trip() -> bytes:
        store = a_store(tmp_path)
        info = await store.put(DIGEST, ImageFormat.BTRFS, chunks(DATA))
        assert (info.stream_bytes, info.format) == (len(DATA), ImageFormat.BTRFS)
        assert [i.digest for i in (await store.list_images()).images] == [DIGEST]
        return b"".join([c async for c in await store.stream(DIGEST)])

    assert asyncio.run(round_trip()) == DATA


def test_an_image_survives_a_restart_and_half_of_one_does_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        await a_store(tmp_path).put(DIGEST, ImageFormat.TAR, chunks(DATA))
        (tmp_path / "incoming" / "left").write_bytes(b"half")
        again = a_store(tmp_path)
        assert await again.find(DIGEST) is not None
        assert list((tmp_path / "incoming").iterdir()) == []

    asyncio.run(scenario())


def test_the_description_alone_is_no_image(tmp_path: Path) -> None:
    """A crash may fall between description and stream. The order of publishing makes it
    harmless."""

    async def scenario() -> None:
        store = a_store(tmp_path)
        await store.put(DIGEST, ImageFormat.TAR, chunks(DATA))
        (tmp_path / f"{DIGEST[7:]}.image").unlink()
        assert await store.find(DIGEST) is None
        with pytest.raises(NotFound):
            await store.stream(DIGEST)
        await store.put(DIGEST, ImageFormat.TAR, chunks(DATA))
        assert await store.find(DIGEST) is not None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (chunks(DATA + b"x"), Unprocessable),
        (chunks(DATA[:-1]), Unprocessable),
        (chunks(b""), Unprocessable),
        (cut_off(DATA), InvalidInput),
        (chunks(b"\0" * (9 << 20)), TooLarge),
    ],
)
def test_a_wrong_stream_leaves_nothing(
    tmp_path: Path, stream: AsyncIterator[bytes], error: type[Exception]
) -> None:
    async def scenario() -> None:
        with pytest.raises(error):
            await a_store(tmp_path).put(DIGEST, ImageFormat.TAR, stream)

    asyncio.run(scenario())
    assert files(tmp_path) == set()


def test_a_full_disk_is_reported_and_nothing_is_left(tmp_path: Path, mocker: MockerFixture) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    mocker.patch("control_plane.images.store._append", side_effect=full)

    async def scenario() -> None:
        with pytest.raises(HostError, match="No space left on device") as failure:
            await a_store(tmp_path).put(DIGEST, ImageFormat.TAR, chunks(DATA))
        assert "free space" in failure.value.hint

    asyncio.run(scenario())
    assert files(tmp_path) == set()


def test_the_same_image_again_is_a_success_and_as_another_format_a_conflict(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        store = a_store(tmp_path)
        first = await store.put(DIGEST, ImageFormat.TAR, chunks(DATA))
        assert await store.put(DIGEST, ImageFormat.TAR, chunks(DATA)) == first
        with pytest.raises(Conflict, match="as tar"):
            await store.put(DIGEST, ImageFormat.BTRFS, chunks(DATA))

    asyncio.run(scenario())


def test_two_senders_of_one_image_both_succeed(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = a_store(tmp_path)
        puts = [store.put(DIGEST, ImageFormat.TAR, chunks(DATA)) for _ in range(2)]
        await asyncio.gather(*puts)
        assert len((await store.list_images()).images) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("digest", ["", "sha256:x", "../../etc/passwd", "sha256:" + "A" * 64])
def test_only_a_digest_names_an_image(tmp_path: Path, digest: str) -> None:
    with pytest.raises(InvalidInput):
        asyncio.run(a_store(tmp_path).find(digest))


@pytest.mark.behaviour("BUG-CP23")
def test_an_image_can_be_removed_unless_a_job_runs_it(tmp_path: Path) -> None:
    """Formerly images were never deleted."""

    async def story() -> None:
        store = a_store(tmp_path)
        await store.put(DIGEST, ImageFormat.TAR, chunks(DATA))
        with pytest.raises(Conflict, match="job a, b, c, d, e and 1 more uses it"):
            await store.remove(DIGEST, lambda _: list("abcdef"))
        assert await store.find(DIGEST) is not None
        await store.remove(DIGEST, lambda _: [])
        assert files(tmp_path) == set()
        with pytest.raises(NotFound, match="there is no image"):
            await store.remove(DIGEST, lambda _: [])
        await store.put(DIGEST, ImageFormat.BTRFS, chunks(DATA))

    asyncio.run(story())


@pytest.mark.behaviour("BUG-CP23")
def test_an_interrupted_removal_is_completed_after_a_restart(tmp_path: Path) -> None:
    """A removal deletes the stream first, so half of an image does not count as an image."""

    async def story() -> None:
        await a_store(tmp_path).put(DIGEST, ImageFormat.TAR, chunks(DATA))
        next(tmp_path.glob("*.image")).unlink()
        assert await a_store(tmp_path).find(DIGEST) is None
        assert files(tmp_path) == set()

    asyncio.run(story())


def a_signature(pem: bytes, name: str = "web/1", digest: str = DIGEST) -> ImageSignature:
    key, made = signatures.sign(pem, name, digest)
    return ImageSignature(name=name, key=key, signature=made)


def test_signatures_stay_with_an_image_and_a_key_has_one(tmp_path: Path) -> None:
    ours, others = signatures.new_key(), signatures.new_key()

    async def scenario() -> None:
        store = a_store(tmp_path)
        await store.put(DIGEST, ImageFormat.TAR, chunks(DATA))
        await asyncio.gather(
            store.sign(DIGEST, a_signature(ours)), store.sign(DIGEST, a_signature(others))
        )
        await store.sign(DIGEST, a_signature(ours, "web/1.0.1"))
        found = await a_store(tmp_path).find(DIGEST)
        assert found is not None
        assert [s.name for s in found.signatures] == ["web/1", "web/1.0.1"]
        assert (await store.put(DIGEST, ImageFormat.TAR, chunks(DATA))).signatures

    asyncio.run(scenario())


def test_an_invalid_image_signature_is_not_stored(tmp_path: Path) -> None:
    key = signatures.new_key()
    good, elsewhere = a_signature(key), a_signature(key, digest="sha256:" + "0" * 64)

    async def scenario() -> None:
        store = a_store(tmp_path)
        await store.put(DIGEST, ImageFormat.TAR, chunks(DATA))
        unknown_signature = a_signature(signatures.new_key())
        for bad in (
            elsewhere,
            ImageSignature(name="web/2", key=good.key, signature=good.signature),
            ImageSignature(name=good.name, key=good.key, signature=unknown_signature.signature),
        ):
            with pytest.raises(Unprocessable, match="this signature does not match image"):
                await store.sign(DIGEST, bad)
        with pytest.raises(NotFound):
            await store.sign(elsewhere_digest, elsewhere)
        found = await store.find(DIGEST)
        assert found is not None
        assert found.signatures == []
        for _ in range(16):
            await store.sign(DIGEST, a_signature(signatures.new_key()))
        with pytest.raises(Conflict, match="16 signatures"):
            await store.sign(DIGEST, good)

    elsewhere_digest = "sha256:" + "0" * 64
    asyncio.run(scenario())


@pytest.mark.behaviour("BUG-HT27")
def test_images_of_one_owner_take_no_more_than_their_share(tmp_path: Path) -> None:
    """Two streams at once do not exceed it either. Other owners and operators are not bound by
    it."""
    halves = DATA[: 3 << 19], DATA[3 << 19 :]

    def digest(data: bytes) -> str:
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    async def scenario() -> None:
        store = ImageStore(tmp_path, lambda: 1000.0, 8 << 20, 2 << 20)
        made = await asyncio.gather(
            *(store.put(digest(d), ImageFormat.TAR, chunks(d), "ann") for d in halves),
            return_exceptions=True,
        )
        refused = [isinstance(m, TooLarge) for m in made]
        assert any(refused)
        half, other = halves if refused[1] else reversed(halves)  # either half may come first
        await store.put(digest(half), ImageFormat.TAR, chunks(half), "ann")
        with pytest.raises(TooLarge, match="share of 2097152 bytes"):
            await store.put(digest(other), ImageFormat.TAR, chunks(other), "ann")
        await store.put(digest(other), ImageFormat.TAR, chunks(other), "bob")
        await store.put(DIGEST, ImageFormat.TAR, chunks(DATA))
        await store.remove(digest(half), lambda _: ())
        left = DATA[: 1 << 20]
        await store.put(digest(left), ImageFormat.TAR, chunks(left), "ann")
        assert {i.owner for i in (await store.list_images()).images} == {"ann", "bob", ""}

    asyncio.run(scenario())


@pytest.mark.behaviour("BUG-CP142")
def test_an_image_that_is_pushed_or_removed_twice_at_once_is_counted_once(tmp_path: Path) -> None:
    """Formerly each sender added its size to its owner's share, and each removal subtracted it."""
    small, large = DATA[: 1 << 20], DATA[: 2 << 20]

    def digest(data: bytes) -> str:
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    async def push(store: ImageStore, data: bytes, owner: str = "ann") -> None:
        await store.put(digest(data), ImageFormat.TAR, chunks(data), owner)

    async def scenario() -> None:
        store = ImageStore(tmp_path, lambda: 1000.0, 8 << 20, 3 << 20)
        await asyncio.gather(push(store, small), push(store, small))
        await push(store, large)
        both = [store.remove(digest(small), lambda _: ()) for _ in range(2)]
        removed = await asyncio.gather(*both, return_exceptions=True)
        assert [type(error) for error in removed] == [type(None), NotFound]
        with pytest.raises(TooLarge, match="2097152 are stored"):
            await push(store, DATA[1 << 20 :])

    asyncio.run(scenario())


@pytest.mark.behaviour("BUG-CP142")
def test_damaged_names_are_kept_and_no_name_is_given(tmp_path: Path) -> None:
    """Formerly the next name replaced the file, so any user could take the name of another."""

    async def scenario() -> None:
        (tmp_path / "names").write_bytes(b'{"web:stable": ')
        store = a_store(tmp_path)
        await store.put(DIGEST, ImageFormat.TAR, chunks(DATA))
        with pytest.raises(HostError, match=r"names in .* cannot be read"):
            await store.name(DIGEST, "web:stable", "bob")
        await store.remove(DIGEST, lambda _: ())
        assert (tmp_path / "names").read_bytes() == b'{"web:stable": '

    asyncio.run(scenario())


@pytest.mark.behaviour("BUG-UX3")
def test_a_name_means_the_image_that_it_was_given_last(tmp_path: Path) -> None:
    """The name survives a restart, belongs to the user that first set it, and ends with its
    image."""
    other = f"sha256:{hashlib.sha256(b'other').hexdigest()}"

    async def scenario() -> None:
        store = a_store(tmp_path)
        with pytest.raises(NotFound):
            await store.name(DIGEST, "redis:7", "ann")
        await store.put(DIGEST, ImageFormat.TAR, chunks(DATA))
        await store.put(other, ImageFormat.TAR, chunks(b"other"))
        assert (await store.name(DIGEST, "redis:7", "ann")).names == ["redis:7"]
        assert (await store.name(DIGEST, "redis:latest", "ann")).names == [
            "redis:7",
            "redis:latest",
        ]
        with pytest.raises(Forbidden, match="belongs to ann"):
            await store.name(other, "redis:7", "bob")
        # an operator may take it, and ann may take it again
        await store.name(other, "redis:latest")
        await store.name(other, "redis:latest", "ann")
        again = a_store(tmp_path)
        assert {i.digest: i.names for i in (await again.list_images()).images} == {
            DIGEST: ["redis:7"],
            other: ["redis:latest"],
        }
        await again.remove(DIGEST, lambda _: ())
        await again.put(DIGEST, ImageFormat.TAR, chunks(DATA))
        found = await again.find(DIGEST)
        assert found is not None
        assert found.names == []

    asyncio.run(scenario())
