"""`twine-conveyor`: the delivery service as a program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import click

from control_plane.cli.jobfile import read_document
from control_plane.cli.program import Program, Target
from control_plane.commands import until_signal
from control_plane.process import boot_id, open_or_stand_by, run_until
from control_plane.runtime.anchor import Anchor
from control_plane.runtime.runtime import Runtime
from control_plane.store import Store
from conveyor.command_checks import CommandChecks
from conveyor.config import ConveyorConfig, load, open_store
from conveyor.fleet_hosts import CommandHosts
from conveyor.fleets import FleetReleases
from conveyor.gates import GateMeter
from conveyor.pipeline_file import pipeline_spec
from conveyor.push import PushIntents
from conveyor.records import DeliveryRecords
from conveyor.server import DeliveryAccess, serving
from conveyor.service import ROUND_S, DeliveryService
from wire import log as logs
from wire import tls
from wire.notify import notify


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twine-cluster", prog_name="twine-conveyor")
def main() -> None:
    """Deliver new images to jobs in stages with gates; roll back if one fails."""


@main.command()
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file.")
def serve(file: Path | None) -> None:
    """Carry out pipelines until SIGTERM; tasks and jobs stay as they are when it ends."""
    config = load(file)
    logs.configure("twine-conveyor", "info")
    started = partial(click.echo, f"serves at {config.socket}", err=True)
    asyncio.run(until_signal(lambda stopping: run_service(config, stopping, started)))


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Show all errors of a pipeline FILE; calls no server."""
    spec = pipeline_spec(read_document(file), str(file))
    targets = f"{len(spec.jobs)} jobs" if spec.jobs else f"{len(spec.fleets)} fleets"
    click.echo(f"{file}: pipeline {spec.name}, {len(spec.stages)} stages, {targets}")


async def run_service(
    config: ConveyorConfig,
    stopping: asyncio.Event,
    started: Callable[[], None],
    round_s: float = ROUND_S,
) -> None:
    """Run the service until `stopping` is set; waits while another instance has the store.

    `round_s` is the interval between reads of jobs and hosts that are changing, in seconds.
    """
    runtime = Runtime()
    store = open_store(config)
    stand_by = partial(notify, "READY=1\nSTATUS=standing by")
    async with AsyncExitStack() as stack:
        if not await open_or_stand_by(stack, store, stopping, runtime, stand_by):
            return
        anchor = Anchor(store, runtime, boot_id())
        await anchor.load()
        async with _serving(config, store, runtime, round_s) as (service, fleets):
            notify("READY=1", "STATUS=serving")
            started()
            loops = (service.run(), fleets.run(), runtime.watch_clocks(), anchor.run())
            await run_until(stopping, *loops, store.wait_failed())


@asynccontextmanager
async def _serving(
    config: ConveyorConfig, store: Store, runtime: Runtime, round_s: float
) -> AsyncIterator[tuple[DeliveryService, FleetReleases]]:
    credential = Path(config.credential) if config.credential else None
    async with Target(config.endpoint or None, credential).client() as client:
        meter = GateMeter(CommandChecks(client))
        hosts = CommandHosts(client)
        jobs = PushIntents(client)
        boot = boot_id()
        writer = FleetReleases(store, jobs, hosts, config.fleets, runtime, round_s, boot)
        records = DeliveryRecords(store)
        service = DeliveryService(records, writer, runtime, meter, round_s=round_s, boot=boot)
        await service.load()
        address, at = config.listen_on(), None
        if address is not None:
            held = tls.load(Path(config.server_credential))
            at = (*address, tls.server_context(held, require_client=True))
        access = DeliveryAccess(frozenset(config.writers))
        async with serving(service, access, Path(config.socket), at):
            yield service, writer


if __name__ == "__main__":
    main()
