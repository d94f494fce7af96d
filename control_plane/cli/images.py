"""`twinectl image`: push and list."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.api import ImageFormat, ImageInfo, Images
from agent.errors import InvalidInput
from agent.wire.quantities import about_size
from control_plane.cli import show
from control_plane.cli.program import Target
from control_plane.cli.show import output_option

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

CHUNK_BYTES = 1 << 20
_BTRFS_MAGIC = b"btrfs-stream\0"
"""First bytes of `btrfs send` (Linux, fs/btrfs/send.h)."""
Advance = Callable[[int], None]


@click.group()
def image() -> None:
    """Root file systems that tasks run from."""


@image.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["tar", "btrfs", "oci"]), help="[default: looks]"
)
@output_option
@click.pass_obj
def push(target: Target, file: Path, form: str | None, output: str) -> None:
    """Put FILE into the image store; print its digest.

    A tar, a stream of `btrfs send`, or with `--format oci` an OCI archive.
    """
    if not file.is_file():
        raise InvalidInput(f"cannot push {file}: there is no such file")
    format_ = ImageFormat(form) if form else _looks_like(file)
    size = file.stat().st_size
    with _bar("reading", size) as advance:
        digest = _digest(file, advance)

    async def work(client: ControlPlaneClient) -> ImageInfo:
        known = {i.digest: i for i in (await client.list_images()).images}
        if digest in known:
            show.progress("already in the image store")
            return known[digest]
        with _bar("pushing", size) as advance:
            return await client.push_image(digest, format_, _chunks(file, advance))

    info = target.ask(work)
    show.emit(output, info, lambda: click.echo(info.digest))


@image.command("list")
@output_option
@click.pass_obj
def list_(target: Target, output: str) -> None:
    """Show all images of the image store."""
    found: Images = target.ask(lambda client: client.list_images())
    rows = [
        (i.digest, i.format.value, about_size(i.stream_bytes), show.ago(i.created_at))
        for i in found.images
    ]
    show.emit(output, found, lambda: show.table(("digest", "format", "size", "age"), rows))


@image.command("rm")
@click.argument("digest")
@click.pass_obj
def remove(target: Target, digest: str) -> None:
    """Remove an image from the image store, unless a job runs it.

    Machines that have it already keep it until they need the room.
    """
    target.ask(lambda client: client.remove_image(digest))
    click.echo(f"{digest} is removed")


def _looks_like(file: Path) -> ImageFormat:
    with file.open("rb") as stream:
        start = stream.read(len(_BTRFS_MAGIC))
    return ImageFormat.BTRFS if start == _BTRFS_MAGIC else ImageFormat.TAR


def _digest(file: Path, advance: Advance) -> str:
    hasher = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hasher.update(chunk)
            advance(len(chunk))
    return f"sha256:{hasher.hexdigest()}"


async def _chunks(file: Path, advance: Advance) -> AsyncIterator[bytes]:
    with file.open("rb") as stream:
        while chunk := await asyncio.to_thread(stream.read, CHUNK_BYTES):
            yield chunk
            advance(len(chunk))


@contextmanager
def _bar(what: str, total: int) -> Iterator[Advance]:
    """Show how far it is, on a terminal; say nothing into a pipe."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
