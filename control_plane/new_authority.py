"""`twine-control-plane new-authority`: replaces an authority whose key is lost."""

from __future__ import annotations

import click

from control_plane.config import Config
from control_plane.identity.lost_authority import drop_authority
from control_plane.store.opening import stopped_store


async def prepare_new_authority(config: Config) -> None:
    """Prepare a new authority for the next start, and print what operators must do then."""
    async with stopped_store(config) as store:
        hosts = await drop_authority(store, config.authority_path)
    click.echo(f"the next start makes a new authority; {len(hosts)} hosts have to join again:")
    for host in hosts:
        click.echo(f"twinectl token create --host {host} -o table")
