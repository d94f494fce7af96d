"""`twine-autoscaler`: adjusts the sizes of jobs to their load, as a client of the front end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import click
import msgspec
from msgspec import Meta

from agent.api.ranges import END
from control_plane.api.autoscale import LoadSignal
from control_plane.autoscaler.load_tester import LoadTester
from control_plane.autoscaler.prometheus import PrometheusSource
from control_plane.autoscaler.service import EVERY_S, Autoscaler
from control_plane.autoscaler.serving import serving
from control_plane.autoscaler.signals import LoadSource, TaskUsageSource
from control_plane.autoscaler.sizes import SizeIntents
from control_plane.client import ControlPlaneClient
from control_plane.commands import run, until_signal
from control_plane.process import boot_id, open_or_stand_by, run_until
from control_plane.runtime.anchor import Anchor
from control_plane.runtime.runtime import Runtime
from control_plane.store.sqlite import SqliteStore
from wire import log as logs
from wire import tls
from wire.config_file import read_config
from wire.prometheus import Prometheus

WATCH_HISTORY = 100
"""Changes that the store keeps in memory for watches: there are no watches."""


class AutoscalerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The autoscaler's file, TOML."""

    endpoint: str = "unix:/run/twine/control-plane.sock"
    """The front end: `unix:/PATH` or `https://HOST:PORT`."""
    credential: str = ""
    """File of a user who owns the entitlements, or is an operator; not needed on the socket."""
    state: str = "/var/lib/twine-autoscaler"
    """Folder of its store. A second process with the same folder stands by."""
    socket: str = "/run/twine/autoscaler.sock"
    """The socket that `twinectl autoscale` calls."""
    metrics: Annotated[str, Meta(pattern=r"^(.+:\d{1,5})?" + END)] = ""
    """HOST:PORT of its metrics, over plain HTTP; empty: only on the socket."""
    prometheus: Annotated[str, Meta(pattern=r"^(https?://\S+)?" + END)] = ""
    """Address of the Prometheus server for policies with a query; empty: they are held."""
    every_s: Annotated[float, Meta(ge=10, le=120)] = EVERY_S
    """From one evaluation to the next."""


def client_of(endpoint: str, credential: str) -> ControlPlaneClient:
    """Return the client of the front end, not connected yet; `credential` may be empty."""
    if not credential:
        return ControlPlaneClient(endpoint)
    held = tls.load(Path(credential))
    return ControlPlaneClient(endpoint, tls.client_context(held, tls.API_SERVERS))


async def serve(config: AutoscalerConfig, stopping: asyncio.Event) -> None:
    """Run until `stopping` is set, or until the store or a loop fails."""
    runtime = Runtime()
    async with AsyncExitStack() as stack:
        store = SqliteStore(Path(config.state), WATCH_HISTORY)
        if not await open_or_stand_by(stack, store, stopping, runtime):
            return
        anchor = Anchor(store, runtime, boot_id())
        await anchor.load()
        client = await stack.enter_async_context(client_of(config.endpoint, config.credential))
        usage = TaskUsageSource(runtime, client.describe_task)
        built_in = (LoadSignal.CPU, LoadSignal.MEMORY, LoadSignal.NETWORK)
        sources: dict[LoadSignal, LoadSource] = dict.fromkeys(built_in, usage)
        server = None
        if config.prometheus:
            server = await stack.enter_async_context(Prometheus(config.prometheus))
            sources[LoadSignal.QUERY] = PrometheusSource(server, runtime)
        writer = SizeIntents(client)
        autoscaler = Autoscaler(runtime, client, store, sources, writer, config.every_s)
        tester = LoadTester(runtime, client, server)
        stack.push_async_callback(tester.close)
        servers = serving(autoscaler, tester, Path(config.socket), config.metrics)
        await stack.enter_async_context(servers)
        click.echo(f"autoscaler serves at {config.socket}", err=True)
        loops = (autoscaler.run(), runtime.watch_clocks(), anchor.run(), store.wait_failed())
        await run_until(stopping, *loops)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twine-cluster", prog_name="twine-autoscaler")
@click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file.")
@click.option("--endpoint", envvar="TWINE_ENDPOINT", metavar="URL", help="Override the file.")
@click.option("--credential", envvar="TWINE_CREDENTIAL", metavar="FILE", help="Override the file.")
@click.option("--state", metavar="FOLDER", help="Override the file.")
@click.option("--socket", metavar="PATH", help="Override the file.")
@click.option("--prometheus", metavar="URL", help="Override the file.")
def main(file: Path | None, **options: str | None) -> None:
    """Adjust the size of each job with [autoscale] to its load, until SIGTERM.

    Needs the right to resize: an operator's credential, or the control plane's unix socket.
    """
    logs.configure("twine-autoscaler", "info")
    given = {name: value for name, value in options.items() if value is not None}

    async def work(stopping: asyncio.Event) -> None:
        config = AutoscalerConfig() if file is None else read_config(file, AutoscalerConfig)
        await serve(msgspec.structs.replace(config, **given), stopping)

    run(until_signal(work))


if __name__ == "__main__":
    main()
