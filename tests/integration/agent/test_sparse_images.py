"""Zeros in an image become holes on a real btrfs; free disk space limits the unpacking."""

from __future__ import annotations

import hashlib
import os
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import FakeHost, chunks_of, digest_of
from oci import Layout, entry, layer, sha
from on_btrfs import machine, mounted, run, use_real_programs

from agent.api import ImageFormat
from agent.machine.btrfs import HostBtrfs
from agent.machine.layer import apply
from wire.errors import Unprocessable

pytestmark = pytest.mark.root

DISK = 512 << 20
SIZE = 3 << 30
"""Size of a file that is larger than the disk."""
PIECES = {4096: b"a" * 4096, 1 << 30: b"b" * 700, SIZE - 5000: b"c" * 5000}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    """Yield a host with a small disk, whose units run tar and find for real."""
    with mounted(tmp_path, DISK) as host:
        use_real_programs(host, "tar", "find")
        yield host


def sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        for at, data in PIECES.items():
            file.seek(at)
            file.write(data)


def packed(tmp_path: Path, *how: str) -> bytes:
    """Return an archive of a sparse file and a plain one, made by GNU tar."""
    (tmp_path / "top").mkdir()
    sparse_file(tmp_path / "top" / "disk")
    (tmp_path / "top" / "next").write_text("1")
    archive = tmp_path / "archive"
    run("tar", "-c", "-S", *how, "-C", str(tmp_path / "top"), "-f", str(archive), "disk", "next")
    return archive.read_bytes()


def is_as_packed(tree: Path) -> None:
    """Check that both files have their original content, and that the zeros use no space."""
    HostBtrfs().sync(tree)  # before the sync the kernel does not report the space that a file uses
    for at, data in PIECES.items():
        with (tree / "disk").open("rb") as file:
            file.seek(at - 1)
            assert file.read(len(data) + 1) == b"\0" + data
    assert (tree / "disk").stat().st_size == SIZE
    assert (tree / "disk").stat().st_blocks * 512 <= 64 << 10
    assert (tree / "next").read_text() == "1"


FORMATS = {
    "gnu": ["--format=gnu"],
    "pax 0.0": ["--format=posix", "--sparse-version=0.0"],
    "pax 0.1": ["--format=posix", "--sparse-version=0.1"],
    "pax 1.0": ["--format=posix", "--sparse-version=1.0"],
}


@pytest.mark.behaviour("AG3")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_layer_by_gnu_tar_keeps_its_holes_in_each_format(
    host: FakeHost, tmp_path: Path, kind: str
) -> None:
    data = packed(tmp_path, *FORMATS[kind])
    (tmp_path / "blob").write_bytes(data)
    tree = host.state / "tree"
    tree.mkdir()

    apply(str(tmp_path), "blob", "tar", sha(data), sha(data), str(tree))

    is_as_packed(tree)


@pytest.mark.behaviour("AG3")
async def test_a_plain_tar_keeps_the_holes_that_it_was_packed_with(
    host: FakeHost, tmp_path: Path
) -> None:
    data = packed(tmp_path)
    async with host.agent(machine(host)) as client:
        info = await client.put_image(digest_of(data), ImageFormat.TAR, chunks_of(data))
    is_as_packed(host.state / "images" / info.digest.removeprefix("sha256:"))


def zeros_packed(size: int) -> tuple[bytes, str]:
    """Return a compressed layer of one file with this many zeros, and its uncompressed digest."""
    head = layer(entry("zeros", data=b""))[:512]
    head = bytearray(head)
    head[124:136] = b"%011o\0" % size
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    packer, inside = zlib.compressobj(9, wbits=31), hashlib.sha256()
    out = []
    for piece in (bytes(head), *[bytes(1 << 20)] * (size >> 20), bytes(1024)):
        inside.update(piece)
        out.append(packer.compress(piece))
    return b"".join((*out, packer.flush())), "sha256:" + inside.hexdigest()


@pytest.mark.behaviour("F-33")
def test_zeros_beyond_the_disk_take_no_room_and_other_data_does(
    host: FakeHost, tmp_path: Path
) -> None:
    """Unpacking is limited by the space that is used, not by the length of the files."""
    blob, inside = zeros_packed(2 * DISK)
    (tmp_path / "blob").write_bytes(blob)
    tree = host.state / "tree"
    tree.mkdir()
    _, before = HostBtrfs().free_bytes(host.state)

    apply(str(tmp_path), "blob", "gzip", sha(blob), inside, str(tree))

    HostBtrfs().sync(host.state)
    _, after = HostBtrfs().free_bytes(host.state)
    assert len(blob) < 2 << 20
    assert (tree / "zeros").stat().st_size == 2 * DISK
    assert before - after < 1 << 20
    assert (
        subprocess.run(["cmp", "-n", str(2 * DISK), str(tree / "zeros"), "/dev/zero"]).returncode
        == 0
    )

    dense = layer(entry("dense", data=os.urandom(DISK)))
    (tmp_path / "blob").write_bytes(dense)
    with pytest.raises(Unprocessable, match="'dense' cannot be created: No space left on device"):
        apply(str(tmp_path), "blob", "tar", sha(dense), sha(dense), str(tree))


@pytest.mark.behaviour("AG3")
async def test_an_image_of_zeros_is_taken_in_and_takes_no_room(
    host: FakeHost, tmp_path: Path
) -> None:
    data = layer(entry("zeros", data=bytes(64 << 20)), entry("dense", data=os.urandom(1 << 20)))
    layout = Layout(tmp_path / "layout")
    layout.image(data, config={"Cmd": ["/x"]})
    archive = layout.archive()
    async with host.agent(machine(host)) as client:
        form, stream = ImageFormat.OCI, chunks_of(archive, 1 << 20)
        info = await client.put_image(digest_of(archive), form, stream)
    image = host.state / "images" / info.digest.removeprefix("sha256:")
    HostBtrfs().sync(image)
    assert (image / "zeros").read_bytes() == bytes(64 << 20)
    assert ((image / "zeros").stat().st_blocks, (image / "dense").stat().st_blocks) == (0, 2048)
