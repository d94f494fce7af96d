"""`twinectl shard`: shards of the region; `twinectl job shards`: which tasks serve a job's."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
from msgspec.structs import replace

from control_plane.api.ownership import ShardLoad, ShardMoved
from control_plane.api.shards import ShardMap, ShardMapView
from control_plane.cli import show
from control_plane.cli.jobs import job
from control_plane.cli.program import Target, shows_answer
from control_plane.shards.core.scopes import best_of_each_scope, scope_text, unmovable
from wire.errors import Conflict, InvalidInput, NotFound
from wire.quantity_fields import TEXT_ENCODING
from wire.routes import decode_json
from wire.unique_keys import json_with_unique_keys

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient


@job.command()
@click.argument("name")
@click.option(
    "--set",
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='A JSON object such as {"orders-1": [0, 3], "orders-2": [1, 4]}; replaces all.',
)
@shows_answer
def shards(target: Target, name: str, file: Path | None, output: str) -> None:
    """Show or set which tasks of a job serve which shards."""
    given = None
    if file is not None:
        given = _shard_map(file)

    async def work(client: ControlPlaneClient) -> ShardMapView:
        return await (client.get_shards(name) if given is None else client.put_shards(name, given))

    view = target.ask(work)
    rows = [(shard, ", ".join(map(str, tasks)) or "-") for shard, tasks in view.shards.items()]
    show.emit(output, view, lambda: show.table(("shard", "tasks"), rows))


def _shard_map(file: Path) -> ShardMap:
    try:
        table = json_with_unique_keys(file.read_bytes().decode(TEXT_ENCODING))
    except (ValueError, RecursionError) as e:
        raise InvalidInput(f"{file} is not JSON: {e}") from e
    return cast(
        "ShardMap", decode_json(json.dumps({"shards": table}).encode(), ShardMap, str(file))
    )


@click.group()
def shard() -> None:
    """Shards of the region: a scheduler with an allocator each, by entitlement."""


@shard.command("list")
@shows_answer
def shard_list(target: Target, output: str) -> None:
    """Show the load of each shard; the one with the least gets a new entitlement."""
    found = target.ask(lambda client: client.list_shards())
    has = ("machines", "load", "entitlements", "jobs", "tasks")
    columns = ("shard", "scope", *has, "moving to it", "host")
    rows = [_row(load) for load in found.shards]
    show.emit(output, found, lambda: show.table(columns, rows))


def _row(load: ShardLoad) -> tuple[object, ...]:
    moving = ", ".join(load.moving) or "-"
    has = (load.machines, load.load, len(load.entitlements), load.jobs, load.tasks)
    return (load.shard, scope_text(load.region), *has, moving, load.host or "-")


@shard.command("show")
@click.argument("number", type=click.IntRange(min=0))
@shows_answer
def shard_show(target: Target, number: int, output: str) -> None:
    """Show the scope of a shard, its entitlements, and where they are pinned to."""
    found = target.ask(lambda client: client.list_shards())
    load = next((one for one in found.shards if one.shard == number), None)
    if load is None:
        raise NotFound(f"there is no shard {number}", hint="twinectl shard list")
    rows = [(name, load.pinned.get(name, "(any)")) for name in load.entitlements]

    def lines() -> None:
        show.lines(f"shard {number}: {scope_text(load.region)}")
        show.table(("entitlement", "region"), rows)

    show.emit(output, load, lines)


@shard.command("move")
@click.argument("entitlement")
@click.option("--to", type=click.IntRange(min=0), required=True, help="Shard that gets it.")
@click.option("--plan", is_flag=True, help="Only show what would move.")
@shows_answer
def shard_move(target: Target, entitlement: str, to: int, plan: bool, output: str) -> None:
    """Give an entitlement to another shard; no task restarts."""
    moved = target.ask(lambda client: client.move_entitlement(entitlement, to, dry_run=plan))
    show.emit(output, moved, lambda: show.lines(_move_text(moved, plan=plan)))


def _move_text(moved: ShardMoved, *, plan: bool) -> str:
    if moved.from_shard == moved.to_shard:
        return f"entitlement {moved.entitlement} is already in shard {moved.to_shard}"
    verb = "would move" if plan else "moved"
    return (
        f"entitlement {moved.entitlement} {verb} from shard {moved.from_shard} to"
        f" {moved.to_shard}, with {moved.machines} machines and {len(moved.jobs)} jobs"
    )


@shard.command("drain")
@click.argument("number", type=click.IntRange(min=0))
@click.option("--plan", is_flag=True, help="Only show what would move.")
@shows_answer
def shard_drain(target: Target, number: int, plan: bool, output: str) -> None:
    """Give all entitlements of a shard to the least loaded shards; no task restarts.

    Those that are pinned to a region go to a shard of that region, if there is another one.
    Entitlements that are created meanwhile may come to it: drain it again until nothing moves.
    """

    async def work(client: ControlPlaneClient) -> list[ShardMoved]:
        loads = {one.shard: one for one in (await client.list_shards()).shards}
        if number not in loads:
            raise NotFound(f"there is no shard {number}", hint="twinectl shard list")
        drained = loads.pop(number)
        if not loads:
            raise Conflict(
                f"cannot drain shard {number}: it is the only one", hint="start another shard"
            )
        if left := unmovable(drained, [*loads.values()]):
            raise Conflict(
                f"cannot drain shard {number}: no other shard may own {', '.join(left[:10])}; all "
                "others are for other regions",
                hint="start a global shard, or one of their region (scheduler.shard_regions)",
            )
        done = []
        for entitlement in drained.entitlements:
            order = best_of_each_scope([*loads.values()], drained.pinned.get(entitlement))
            done.append(await _given(client, entitlement, order, plan=plan))
            to = loads[done[-1].to_shard]
            loads[to.shard] = replace(to, load=to.load + done[-1].machines)
        return done

    moved = target.ask(work)

    def lines() -> None:
        for one in moved:
            show.lines(_move_text(one, plan=plan))
        click.echo(f"{len(moved)} entitlements")

    show.emit(output, moved, lines)


async def _given(
    client: ControlPlaneClient, entitlement: str, order: list[int], *, plan: bool
) -> ShardMoved:
    """Move an entitlement to the first shard of a list that accepts it."""
    for to in order[:-1]:
        with suppress(Conflict):  # it still has machines of another region
            return await client.move_entitlement(entitlement, to, dry_run=plan)
    return await client.move_entitlement(entitlement, order[-1], dry_run=plan)
