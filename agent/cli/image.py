"""Commands about images: listing, fetching, removing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent import api
from agent.cli import show
from agent.cli.layout import archived, digest_of_file
from agent.cli.program import call
from agent.cli.show import output_option
from wire.errors import InvalidInput, NotFound, TwineError
from wire.options import former_names
from wire.units import about_size

if TYPE_CHECKING:
    from agent.client import AgentClient

_FORMS = (
    "sha256:DIGEST, a .tar, oci:REGISTRY/REPOSITORY:TAG, oci-archive:FILE[:TAG] or"
    " oci-layout:FOLDER[:TAG]"
)


@click.group()
def image() -> None:
    """Images of this machine: list, fetch, delete."""


@image.command("list")
@output_option
@click.pass_obj
def images(config_path: Path | None, output: str) -> None:
    """Show the images on this machine."""
    answer = call(config_path, lambda c: c.list_images())
    rows = [
        (i.digest, str(i.format), about_size(i.stream_bytes), ", ".join(i.tasks) or "-")
        for i in answer.images
    ]
    show.listing(output, answer, ("IMAGE", "FORMAT", "SIZE", "TASKS"), rows)


@former_names(image, "rm")
@image.command("delete")
@click.argument("digest")
@click.pass_obj
def image_rm(config_path: Path | None, digest: str) -> None:
    """Remove the image DIGEST (or its first digits) that no task runs from."""

    async def remove(client: AgentClient) -> str:
        held = [i.digest for i in (await client.list_images()).images]
        matches = [d for d in held if d.removeprefix("sha256:").startswith(_digits(digest))]
        if len(matches) > 1:
            raise InvalidInput(
                f"{digest} is a prefix of {len(matches)} images",
                hint="give more digits: " + ", ".join(matches[:3]),
            )
        if not matches:
            raise NotFound(
                f"there is no image {digest} on this machine", hint="twine-agent image list"
            )
        await client.delete_image(matches[0])
        return matches[0]

    click.echo(f"{call(config_path, remove)}: removed")


def _digits(digest: str) -> str:
    digits = digest.removeprefix("sha256:")
    if len(digits) < 4 or set(digits) - set("0123456789abcdef"):
        raise InvalidInput(
            f"{digest!r} is not a digest", hint="sha256:… or 4 of its digits or more"
        )
    return digits


@image.command("pull")
@click.argument("reference", required=False)
@click.option("--list", "listed", is_flag=True, help="Show running fetches instead.")
@click.option(
    "--cancel", is_flag=True, help="Cancel the fetch of REFERENCE instead, as --list names it."
)
@output_option
@click.pass_obj
def image_pull(
    config_path: Path | None, reference: str | None, listed: bool, cancel: bool, output: str
) -> None:
    """Fetch the image REFERENCE (REGISTRY/REPOSITORY:TAG or …@sha256:…) and print its digest.

    Layers that are here already are not fetched again. The fetch continues if this command is
    interrupted: --list shows running fetches, --cancel ends one.
    """
    if listed:
        found = call(config_path, lambda client: client.list_imports())
        rows = [(i.name, show.age(i.began_at)) for i in found.images]
        return show.listing(output, found, ("IMAGE", "FOR"), rows)
    if reference is None:
        raise InvalidInput("which image?", hint="image pull REGISTRY/REPOSITORY:TAG, or --list")
    if cancel:
        name = reference.removeprefix("oci:")
        answer = call(config_path, lambda client: client.cancel_import(name))
        return click.echo(f"{name}: {answer.detail}")
    info = call(config_path, lambda client: fetch(client, _reference(reference)))
    return show.json(info) if output == "json" else click.echo(info.digest)


@image.command("stage")
@click.argument("reference")
@click.pass_obj
def image_stage(config_path: Path | None, reference: str) -> None:
    """Have the agent fetch the image REFERENCE in the background; `events` shows the progress."""
    answer = call(config_path, lambda client: client.stage_image(_reference(reference)))
    click.echo(answer.detail)


def _reference(text: str) -> str:
    reference = text.removeprefix("oci:")
    if not re.match(api.REFERENCE_PATTERN, reference):
        raise InvalidInput(
            f"{text!r} does not name an image in a registry",
            hint="REGISTRY[:PORT]/REPOSITORY[:TAG][@sha256:…], for instance quay.io/team/web:3",
        )
    return reference


async def fetch(client: AgentClient, reference: str) -> api.ImageInfo:
    """Have the agent fetch an image from a registry, and print the progress."""
    progress = _Progress(client, (await client.get_events(0)).latest, reference)
    fetching = asyncio.create_task(client.fetch_oci_image(reference))
    following = asyncio.create_task(progress.follow())
    try:
        info = await fetching
    finally:
        for task in (fetching, following):
            task.cancel()
        await asyncio.gather(fetching, following, return_exceptions=True)
    with suppress(TwineError):  # the image is here; a failure to read its last events is harmless
        await progress.print_new(0.0)
    return info


class _Progress:
    """Prints events of the image that a reference names, and skips other images in transfer."""

    def __init__(self, client: AgentClient, after: int, reference: str) -> None:
        self._client, self._after = client, after
        self._first = api.pull_event_text(reference)
        self._digests = set[str]()

    async def follow(self) -> None:
        while True:
            await self.print_new(10.0)

    async def print_new(self, wait_s: float) -> None:
        events = await self._client.get_events(self._after, wait_s=wait_s)
        self._after = events.latest
        for event in events.events:
            if event.message == self._first:
                self._digests.add(event.object)
            if event.kind == "image" and event.object in self._digests:
                short = event.object.removeprefix("sha256:")[:12]
                click.echo(show.printable(f"{short}: {event.message}"), err=True)


async def resolve_image(client: AgentClient, image: str) -> str:
    """Return the digest of an image, given in any form, once it is on this machine."""
    kind, _, rest = image.partition(":")
    if kind == "sha256":
        return image
    if kind == "oci":
        return (await fetch(client, _reference(image))).digest
    if kind in ("oci-archive", "oci-layout"):
        with archived(kind, rest) as archive:
            return await _put(client, archive, api.ImageFormat.OCI, image)
    if not Path(image).is_file():
        raise InvalidInput(f"{image!r} is neither a digest nor a file", hint=_hint_for(image))
    return await _put(client, Path(image), api.ImageFormat.TAR, image)


def _hint_for(image: str) -> str:
    """Return a hint for a name that is no image."""
    if Path(image, "index.json").is_file():
        return f"name this layout as oci-layout:{image}"
    if image.startswith(("docker-archive:", "docker-daemon:", "containers-storage:", "dir:")):
        return f"make an archive of it: skopeo copy {image} oci-archive:FILE"
    name = image.removeprefix("docker://")
    registry, slash, _ = name.partition("/")
    if slash and ("." in registry or ":" in registry) and re.match(api.REFERENCE_PATTERN, name):
        return f"name an image of a registry as oci:{name}"
    if re.match(api.REFERENCE_PATTERN, f"registry/{name}") and not name.endswith(".tar"):
        return f"name an image of a registry as oci:REGISTRY/{name}; other forms: {_FORMS}"
    return _FORMS


async def _put(client: AgentClient, path: Path, format_: api.ImageFormat, asked: str) -> str:
    """Send a file as the image `asked`; return its digest."""
    click.echo(f"reading {asked}", err=True)
    digest = await asyncio.to_thread(digest_of_file, path)
    try:
        info = await client.put_image(digest, format_, _chunks(path))
    except TwineError as e:
        e.args = (f"{asked}: {e}",)  # the message itself has only the digest
        raise
    click.echo(f"image {info.digest}", err=True)
    return info.digest


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, 1 << 20):
            yield chunk
