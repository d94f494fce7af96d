"""How the program is called and how it ends: the local agent, exit codes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

from agent.cli.show import printable
from agent.config import load, local_socket
from wire.errors import TwineError

if TYPE_CHECKING:
    from agent.client import AgentClient

T = TypeVar("T")


def run_program(cli: click.Command) -> None:
    """Run the command line; every failure on purpose is one message and an exit code."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(64)
    except TwineError as e:
        fail(e)


def fail(error: TwineError) -> NoReturn:
    """End the program: say what failed and what to try."""
    click.echo(f"twine-agent: {printable(str(error))}", err=True)
    told = [printable(f"{one.field}: {one.reason}") for one in error.errors]
    for line in told if any(line not in str(error) for line in told) else ():
        click.echo(f"  {line}", err=True)
    if error.hint:
        click.echo(f"  try: {printable(error.hint)}", err=True)
    sys.exit(error.exit_code)


def call(config_path: Path | None, ask: Callable[[AgentClient], Awaitable[T]]) -> T:
    """Return what the agent of this host answers."""
    from agent.client import AgentClient

    async def run() -> T:
        async with AgentClient(local_socket(load(config_path))) as client:
            return await ask(client)

    try:
        return asyncio.run(run())
    except KeyboardInterrupt:
        raise click.Abort from None
