"""Common parts of the commands of daemons: options, signals, and exit."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import click

from control_plane import config as configuration
from wire.errors import TwineError

CONFIG = click.option("--config", "file", type=click.Path(path_type=Path), help="TOML file.")
STATE = click.option("--state", help="Folder of the store, the authority and the images.")


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options `--config` and `--state`, and pass it their `config`.

    An error of the configuration or of the command ends the process as `fail` does.
    """

    @CONFIG
    @STATE
    @wraps(command)
    def with_config(file: Path | None, state: str | None, **given: Any) -> None:
        try:
            command(configuration.load(file, {"state": state}), **given)
        except TwineError as e:
            fail(e)

    return with_config


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine; an expected error is printed, and ends the process with its exit code."""
    try:
        asyncio.run(work)
    except TwineError as e:
        fail(e)


async def until_signal(work: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run work with an event that SIGTERM and SIGINT set; it should end soon after that."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await work(stopping)


def fail(error: TwineError) -> None:
    """Exit with the error, its hint, and its exit code."""
    click.echo(f"error: {error}", err=True)
    if error.hint:
        click.echo(f"hint:  {error.hint}", err=True)
    sys.exit(error.exit_code)
