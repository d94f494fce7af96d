"""`twinectl job shards`: which tasks serve which shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from control_plane.api.shards import ShardMap, ShardMapView
from control_plane.cli import show
from control_plane.cli.program import Target
from control_plane.cli.show import output_option
from wire.routes import decode_json

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient


@click.command()
@click.argument("name")
@click.option(
    "--set",
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='A JSON object such as {"orders-1": [0, 3], "orders-2": [1, 4]}; replaces all.',
)
@output_option
@click.pass_obj
def shards(target: Target, name: str, file: Path | None, output: str) -> None:
    """Show or say which tasks of a job serve which shards."""
    given = None
    if file is not None:
        wrapped = b'{"shards":' + file.read_bytes() + b"}"
        given = decode_json(wrapped, ShardMap, str(file))

    async def work(client: ControlPlaneClient) -> ShardMapView:
        return await (client.get_shards(name) if given is None else client.put_shards(name, given))

    view = target.ask(work)
    rows = [(shard, ", ".join(map(str, tasks)) or "-") for shard, tasks in view.shards.items()]
    show.emit(output, view, lambda: show.table(("shard", "tasks"), rows))
