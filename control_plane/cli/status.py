"""`twinectl status`: the region on one screen; `twinectl shard add`: wait for one more shard."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from control_plane.api.region_status import ProcessStatus, RegionStatus
from control_plane.cli import show
from control_plane.cli.program import Target, shows_answer
from control_plane.cli.shards import shard
from control_plane.cli.show import output_option
from wire.errors import Conflict, TwineError, Unreachable
from wire.options import seconds

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

_LOOK_S = 0.5
_MIB = 1 << 20
_COLUMNS = (
    *("role", "state", "host", "leads since", "term", "lag", "store p50/p99 ms"),
    *("cpu s", "mib", "machines", "jobs", "tasks"),
)


@click.command()
@output_option
@click.pass_context
def status(context: click.Context, output: str) -> None:
    """Show the state of the region: processes, shards, machines, tasks, and problems.

    The exit code is 1 while there are problems.
    """
    target: Target = context.obj
    found = target.show(output, lambda client: client.region_status(), _print)
    if not found.ok:
        context.exit(1)


def _print(found: RegionStatus) -> None:
    click.echo("the region is well" if found.ok else "not well:")
    for trouble in found.troubles:
        click.echo(f"  {show.printable(trouble)}")
    click.echo(f"machines      {_counts(found.machines)}")
    click.echo(f"tasks         {_counts(found.tasks)}")
    click.echo(f"entitlements  {found.entitlements}")
    click.echo()
    show.table(_COLUMNS, map(_row, found.processes))
    click.echo()
    loads = [(one.shard, one.load, len(one.entitlements), one.machines) for one in found.shards]
    show.table(("shard", "load", "entitlements", "machines"), loads)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {what}" for what, n in sorted(counts.items()) if n) or "none"


def _row(of: ProcessStatus) -> tuple[object, ...]:
    since = show.ago(of.since) if of.since is not None else "-"
    if not of.ok:
        return (of.role, "away", of.host or "-", since, of.term or "-", *("-",) * 7)
    store = f"{1000 * of.write_p50_s:.1f}/{1000 * of.write_p99_s:.1f}" if of.writes else "-"
    used = f"{of.cpu_s:.1f}", of.memory_bytes // _MIB
    return (
        *(of.role, "ready", of.host or "-", since, of.term, of.lag, store),
        *(*used, of.machines, of.jobs, of.tasks),
    )


@shard.command("add")
@click.argument("number", type=click.IntRange(1, 63), required=False)
@click.option("--timeout", type=seconds(), default="5m", show_default=True, help="Time limit.")
@shows_answer
def shard_add(target: Target, number: int | None, timeout: float, output: str) -> None:
    """Wait until the process of shard NUMBER takes requests; without it, of the next free one.

    From then on it may get new entitlements. First prints the command to run, and where.
    """
    ready = target.ask(lambda client: _wait_ready(client, number, timeout))
    text = f"shard {ready.role.removeprefix('shard-')} is ready at {ready.host}"
    show.emit(output, ready, lambda: show.lines(text))


async def _wait_ready(
    client: ControlPlaneClient, number: int | None, timeout_s: float
) -> ProcessStatus:
    """Return the status of a shard's process once it is ready; `Unreachable` if it is not."""
    if number is None:
        taken = {one.shard for one in (await client.list_shards()).shards}
        number = next((n for n in range(1, 64) if n not in taken), None)
        if number is None:
            raise Conflict("cannot add a shard: the region has all 64", hint="twinectl shard list")
    role, has_reported, last = f"shard-{number}", False, "no process of it has ever led"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    found = (await client.region_status()).processes
                    known = next((one for one in found if one.role == role), None)
                except TwineError as e:
                    if not e.retryable:
                        raise
                    known, last = None, str(e)
                if known is not None and known.ok:
                    return known
                last = known.detail if known is not None else last
                if not has_reported:
                    has_reported = True
                    show.progress(
                        f"waiting for shard {number}: on the core's host write its credential,"
                        f" `twine-control-plane shard-credential {number} --host HOST --out FILE`;"
                        f" on HOST run `twine-control-plane serve --role shard --shard {number}`"
                    )
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise Unreachable(
            f"shard {number} is not ready after {show.duration(timeout_s)}: {last}",
            hint="read the log of its process (docs/scale.md, Shards as processes)",
        ) from None
