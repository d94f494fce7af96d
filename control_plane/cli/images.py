"""`twinectl image`: push, list, sign and remove."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.api import ImageFormat, ImageInfo, ImageSignature, NamedImage
from control_plane.cli import show
from control_plane.cli.program import Target, shows_answer
from control_plane.images.formats import HEAD_BYTES, format_of
from wire import signatures
from wire.errors import InvalidInput
from wire.options import former_names
from wire.routes import invalid
from wire.units import about_size
from wire.violations import violations

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

CHUNK_BYTES = 1 << 20
Advance = Callable[[int], None]


@click.group()
def image() -> None:
    """Root file systems that tasks run from."""


@image.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(["tar", "btrfs", "oci"]), help="[default: detected]"
)
@click.option(
    "--name", "names", multiple=True, help="Name to give to the image, as redis:7.2; repeat."
)
@shows_answer
def push(target: Target, file: Path, form: str | None, names: tuple[str, ...], output: str) -> None:
    """Store FILE in the image store; print its digest.

    A tar, a stream of `btrfs send`, or with `--format oci` an OCI archive.
    """
    if not file.is_file():
        why = "it is not a file" if file.exists() else "there is no such file"
        raise InvalidInput(f"cannot push {file}: {why}")
    for name in names:
        _check_name(name)
    format_ = _format(file, form)
    size = file.stat().st_size
    with _bar("reading", size) as advance:
        digest = _digest(file, advance)

    async def work(client: ControlPlaneClient) -> ImageInfo:
        known = {i.digest: i for i in (await client.list_images()).images}
        if digest in known:
            show.progress("already in the image store")
            info = known[digest]
        else:
            with _bar("pushing", size) as advance:
                info = await client.push_image(digest, format_, _chunks(file, advance))
        for name in names:
            info = await client.name_image(digest, name)
        return info

    info = target.ask(work)
    show.emit(output, info, lambda: click.echo(info.digest))


@image.command("list")
@shows_answer
def list_(target: Target, output: str) -> None:
    """Show all images of the image store."""
    found = target.ask(lambda client: client.list_images())
    rows = [
        (
            ", ".join(i.names) or "-",
            i.digest,
            i.format.value,
            about_size(i.stream_bytes),
            show.ago(i.created_at),
            ", ".join(dict.fromkeys(s.name for s in i.signatures)) or "-",
        )
        for i in found.images
    ]
    columns = ("names", "digest", "format", "size", "age", "signed as")
    show.emit(output, found, lambda: show.table(columns, rows))


@image.command("name")
@click.argument("digest")
@click.argument("name")
@shows_answer
def name_(target: Target, digest: str, name: str, output: str) -> None:
    """Set NAME to mean the image DIGEST from now on; applied jobs keep their image."""
    _check_name(name)
    info = target.ask(lambda client: client.name_image(digest, name))
    show.emit(output, info, lambda: click.echo(f"{name} is {digest}"))


def names_of(target: Target) -> dict[str, str]:
    """Return each name of an image, and the digest that it means now."""
    found = target.ask(lambda client: client.list_images())
    return {name: info.digest for info in found.images for name in info.names}


def _check_name(name: str) -> None:
    if found := violations({"name": name}, NamedImage):
        raise invalid(found, "the name of the image")


@image.command()
@click.argument("digest")
@click.option(
    "--name", required=True, help="Name of the image, such as web/1.4; part of the signature."
)
@click.option(
    "--key",
    "file",
    required=True,
    type=click.Path(path_type=Path),
    help="File of the private key, as PEM.",
)
@shows_answer
def sign(target: Target, digest: str, name: str, file: Path, output: str) -> None:
    """Sign the image DIGEST; the signature is stored with it.

    The private key stays on this machine.
    """
    key, signature = signatures.sign(_read_key(file), name, digest)
    document = {"name": name, "key": key, "signature": signature}
    if found := violations(document, ImageSignature):
        raise invalid(found, "the signature")
    made = ImageSignature(**document)
    info = target.ask(lambda client: client.sign_image(digest, made))
    show.emit(output, info, lambda: click.echo(f"{digest} is signed as {name} with {key}"))


@image.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--new", is_flag=True, help="Create a private key in FILE first; the file must not exist."
)
def key(file: Path, new: bool) -> None:
    """Print the public key of FILE as entitlements name it: one of Ed25519, as PEM."""
    if new:
        try:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(signatures.new_key())
        except OSError as e:
            raise InvalidInput(f"cannot create a key in {file}: {e.strerror}") from e
    click.echo(signatures.public_key(_read_key(file)))


def _read_key(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as e:
        raise InvalidInput(f"cannot read the key in {file}: {e.strerror}") from e


@former_names(image, "rm")
@image.command("delete")
@click.argument("digest")
@click.pass_obj
def remove(target: Target, digest: str) -> None:
    """Remove an image from the image store, unless a job runs it.

    Machines that have it keep it until they need the space.
    """
    target.ask(lambda client: client.remove_image(digest))
    click.echo(f"{digest} is removed")


def _format(file: Path, form: str | None) -> ImageFormat:
    """Return the format of an image file, or refuse a file that is none of `form` or of any."""
    with file.open("rb") as stream:
        found = format_of(stream.read(HEAD_BYTES))
    wanted = ImageFormat(form) if form else found
    is_archive = found is ImageFormat.TAR and wanted in (ImageFormat.TAR, ImageFormat.OCI)
    if wanted is None or not (found is wanted or is_archive):
        kind = (
            f"an image in the format {form}"
            if form
            else "a tar, a stream of `btrfs send` or an OCI archive"
        )
        raise InvalidInput(
            f"cannot push {file}: it is not {kind}",
            hint="`tar -C FOLDER -cf FILE .` makes one of the root file system in a folder",
        )
    return wanted


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
    """Show progress on a terminal; print nothing into a pipe."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
