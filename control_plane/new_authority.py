"""`twine-control-plane new-authority`: begin anew where the authority's key is lost for good."""

from __future__ import annotations

import click

from control_plane.config import Config
from control_plane.identity.loss import begin_anew
from control_plane.store.sqlite import SqliteStore
from wire.errors import ConfigError


async def begin(config: Config) -> None:
    """Let the next start make a new authority, and print what people have to do then."""
    if not config.store_path.exists():
        raise ConfigError(f"there is no store in {config.state}", hint="pass --state or --config")
    async with SqliteStore(config.store_path) as store:
        hosts = await begin_anew(store, config.authority_path)
    click.echo(f"the next start makes a new authority; {len(hosts)} hosts have to join again:")
    for host in hosts:
        click.echo(f"twinectl token create --host {host} -o table")
