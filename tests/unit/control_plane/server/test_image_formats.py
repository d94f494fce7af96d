"""How the first bytes of a pushed file determine its image format."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.api import ImageFormat
from control_plane.images.formats import HEAD_BYTES, format_of

pytestmark = pytest.mark.behaviour("BUG-UX89")


def a_tar(form: int = tarfile.GNU_FORMAT, name: str = "bin/serve") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        entry = tarfile.TarInfo(name)
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"#!/\n"))
    return buffer.getvalue()


def an_old_tar() -> bytes:
    """Return the first block of a tar of 1979: without the word `ustar`."""
    block = bytearray(a_tar()[:HEAD_BYTES])
    block[257:265] = bytes(8)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.behaviour("BUG-UX89")
@pytest.mark.parametrize(
    "data",
    [
        *(a_tar(form) for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)),
        *(an_old_tar(), bytes(10_240), a_tar(name="ö" * 200)),
        *(gzip.compress(a_tar()), bz2.compress(a_tar()), lzma.compress(a_tar())),
    ],
)
def test_tars_and_compressed_tars_are_images(data: bytes) -> None:
    assert format_of(data[:HEAD_BYTES]) is ImageFormat.TAR


def test_a_stream_of_btrfs_send_is_an_image() -> None:
    assert format_of(b"btrfs-stream\0" + bytes(99)) is ImageFormat.BTRFS


@pytest.mark.behaviour("BUG-UX89")
@pytest.mark.parametrize("place", [0, 99, 124, 150, 257, 511])
def test_a_header_with_a_changed_byte_is_none(place: int) -> None:
    """The header's checksum covers its bytes."""
    head = bytearray(a_tar()[:HEAD_BYTES])
    head[place] ^= 0x01
    assert format_of(bytes(head)) is None


@pytest.mark.behaviour("BUG-UX89")
@given(st.text(min_size=0, max_size=2000))
def test_a_text_is_no_image(text: str) -> None:
    """Formerly /etc/passwd was accepted."""
    head = f"root:{text}".encode()[:HEAD_BYTES]
    assert format_of(head) is None
