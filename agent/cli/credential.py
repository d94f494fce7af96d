"""Commands that store, list and remove credentials of tasks; values are never shown."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import click

from agent.cli import show
from agent.cli.program import call
from agent.cli.show import output_option
from wire.options import former_names

_entitlement = click.option(
    "--entitlement",
    default="local",
    show_default=True,
    help="Entitlement whose tasks may ask for it.",
)


@click.group()
def credential() -> None:
    """Credentials that this host holds for tasks, only in memory."""


@former_names(credential, "put")
@credential.command("create")
@click.argument("name")
@_entitlement
@click.option("--file", type=click.File("rb"), default="-", help="File to read; standard input.")
@click.pass_obj
def put(config_path: Path | None, name: str, entitlement: str, file: BinaryIO) -> None:
    """Store standard input, unchanged, as credential NAME; replaces an old one."""
    value = file.read()
    info = call(config_path, lambda client: client.put_credential(entitlement, name, value))
    click.echo(f"{info.entitlement}/{info.name}: {info.size_bytes} bytes are held in memory")


@former_names(credential, "ls")
@credential.command("list")
@output_option
@click.pass_obj
def list_(config_path: Path | None, output: str) -> None:
    """List the credentials; their values are never shown."""
    credentials = call(config_path, lambda client: client.list_credentials())
    rows = [
        (c.entitlement, c.name, str(c.size_bytes), show.age(c.put_at))
        for c in credentials.credentials
    ]
    show.listing(output, credentials, ("ENTITLEMENT", "NAME", "BYTES", "AGE"), rows)


@former_names(credential, "rm")
@credential.command("delete")
@click.argument("name")
@_entitlement
@click.pass_obj
def rm(config_path: Path | None, name: str, entitlement: str) -> None:
    """Delete credential NAME; running tasks keep their copy."""
    call(config_path, lambda client: client.delete_credential(entitlement, name))
    click.echo(f"{entitlement}/{name}: forgotten")
