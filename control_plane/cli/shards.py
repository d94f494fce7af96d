"""`twinectl shard`: shards of the region; `twinectl job shards`: which tasks serve a job's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from control_plane.api.ownership import ShardLoad, ShardLoads, ShardMoved
from control_plane.api.shards import ShardMap, ShardMapView
from control_plane.cli import show
from control_plane.cli.program import Target
from control_plane.cli.show import output_option
from wire.errors import InvalidInput, NotFound
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
    """Show or set which tasks of a job serve which shards."""
    given = None
    if file is not None:
        wrapped = b'{"shards":' + file.read_bytes() + b"}"
        given = decode_json(wrapped, ShardMap, str(file))

    async def work(client: ControlPlaneClient) -> ShardMapView:
        return await (client.get_shards(name) if given is None else client.put_shards(name, given))

    view = target.ask(work)
    rows = [(shard, ", ".join(map(str, tasks)) or "-") for shard, tasks in view.shards.items()]
    show.emit(output, view, lambda: show.table(("shard", "tasks"), rows))


@click.group()
def shard() -> None:
    """Shards of the region: a scheduler with an allocator each, by entitlement."""


@shard.command("list")
@output_option
@click.pass_obj
def shard_list(target: Target, output: str) -> None:
    """Show the load of each shard; the one with the least gets a new entitlement."""
    found: ShardLoads = target.ask(lambda client: client.list_shards())
    columns = ("shard", "machines", "load", "entitlements", "jobs", "tasks", "moving to it", "host")
    rows = [_row(load) for load in found.shards]
    show.emit(output, found, lambda: show.table(columns, rows))


def _row(load: ShardLoad) -> tuple[object, ...]:
    moving = ", ".join(load.moving) or "-"
    has = (load.machines, load.load, len(load.entitlements), load.jobs, load.tasks)
    return (load.shard, *has, moving, load.host or "-")


@shard.command("show")
@click.argument("number", type=click.IntRange(min=0))
@output_option
@click.pass_obj
def shard_show(target: Target, number: int, output: str) -> None:
    """Show the entitlements of a shard."""
    found: ShardLoads = target.ask(lambda client: client.list_shards())
    load = next((one for one in found.shards if one.shard == number), None)
    if load is None:
        raise click.UsageError(f"there is no shard {number}; twinectl shard list")
    show.emit(output, load, lambda: show.table(("entitlement",), [(e,) for e in load.entitlements]))


@shard.command("move")
@click.argument("entitlement")
@click.option("--to", type=click.IntRange(min=0), required=True, help="The shard that gets it.")
@click.option("--plan", is_flag=True, help="Only say what would move.")
@output_option
@click.pass_obj
def shard_move(target: Target, entitlement: str, to: int, plan: bool, output: str) -> None:
    """Give an entitlement to another shard; no task restarts."""
    moved: ShardMoved = target.ask(
        lambda client: client.move_entitlement(entitlement, to, dry_run=plan)
    )
    show.emit(output, moved, lambda: click.echo(show.printable(_told(moved, plan=plan))))


def _told(moved: ShardMoved, *, plan: bool) -> str:
    if moved.from_shard == moved.to_shard:
        return f"entitlement {moved.entitlement} is in shard {moved.to_shard} already"
    verb = "would move" if plan else "moved"
    return (
        f"entitlement {moved.entitlement} {verb} from shard {moved.from_shard} to"
        f" {moved.to_shard}, with {moved.machines} machines and {len(moved.jobs)} jobs"
    )


@shard.command("drain")
@click.argument("number", type=click.IntRange(min=0))
@click.option("--plan", is_flag=True, help="Only say what would move.")
@output_option
@click.pass_obj
def shard_drain(target: Target, number: int, plan: bool, output: str) -> None:
    """Give all entitlements of a shard to the least loaded shards; no task restarts.

    Entitlements that are created meanwhile may come to it: drain it again until nothing moves.
    """

    async def work(client: ControlPlaneClient) -> list[ShardMoved]:
        loads = {one.shard: one for one in (await client.list_shards()).shards}
        if number not in loads:
            raise NotFound(f"there is no shard {number}", hint="twinectl shard list")
        load = {shard: one.load for shard, one in loads.items() if shard != number}
        if not load:
            raise InvalidInput(f"shard {number} is the only one: nothing can take its entitlements")
        done = []
        for entitlement in loads[number].entitlements:
            to = min(load, key=lambda shard: (load[shard], shard))
            done.append(await client.move_entitlement(entitlement, to, dry_run=plan))
            load[to] += done[-1].machines
        return done

    moved = target.ask(work)

    def tell() -> None:
        for one in moved:
            click.echo(show.printable(_told(one, plan=plan)))
        click.echo(f"{len(moved)} entitlements")

    show.emit(output, moved, tell)
