"""`twine-taskcontroller`: serves a controller that is defined by a file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click
import msgspec

from taskcontrol import config as configuration
from taskcontrol import server
from wire import log as logs
from wire.errors import TwineError

_FILE = click.argument("file", type=click.Path(path_type=Path))


class _ControllerGroup(click.Group):
    """Commands that print an error of Twine, and end with its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except TwineError as e:
            click.echo(f"error: {e}", err=True)
            if e.hint:
                click.echo(f"hint:  {e.hint}", err=True)
            ctx.exit(e.exit_code)


@click.group(cls=_ControllerGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twine-cluster")
def main() -> None:
    """Decide which operations on the tasks of a job may begin."""


@main.command()
@_FILE
def serve(file: Path) -> None:
    """Answer the control plane by the rules of FILE (TOML), until SIGTERM."""
    config = configuration.load(file)
    host, port = config.listen_on()
    logs.configure("twine-taskcontroller", "info")
    process = configuration.controller(config)

    def started(chosen: int) -> None:
        click.echo(f"controller of {config.job} serves at {host}:{chosen}", err=True)

    asyncio.run(server.serve(process, Path(config.credential), host, port, started))


@main.command()
@_FILE
def check(file: Path) -> None:
    """Check FILE and print its meaning; serve nothing."""
    config = configuration.load(file)
    kind = next(k for k in ("quorum", "shards", "stateless") if getattr(config, k) is not None)
    never = f", never {', '.join(config.never.during)} {config.never.zone}" if config.never else ""
    click.echo(f"{file}: {kind} controller of {config.job}, at {config.listen}{never}")


@main.command()
def openapi() -> None:
    """Print the OpenAPI document that every controller implements."""
    click.echo(msgspec.json.format(msgspec.json.encode(server.openapi())).decode())


if __name__ == "__main__":
    main()
