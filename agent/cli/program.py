"""Runs the command line, calls the local agent, and maps errors to exit codes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

from agent.cli.show import printable
from agent.config import load, local_socket
from wire.error_text import not_utf8
from wire.errors import InvalidInput, TwineError

if TYPE_CHECKING:
    from agent.client import AgentClient

T = TypeVar("T")


def run_program(cli: click.Command) -> None:
    """Run the command line; a `TwineError` becomes one message and an exit code."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as e:
        e.show()
        sys.exit(64)
    except TwineError as e:
        fail(e)
    except UnicodeEncodeError as e:
        fail(InvalidInput(not_utf8(e)))
    except OSError as e:
        fail(InvalidInput(f"cannot use {e.filename or 'a file'}: {e.strerror or e}"))


def fail(error: TwineError) -> NoReturn:
    """Print the error and its hint, and exit."""
    click.echo(f"twine-agent: {printable(str(error))}", err=True)
    lines = [printable(f"{violation.field}: {violation.reason}") for violation in error.errors]
    for line in lines if any(line not in str(error) for line in lines) else ():
        click.echo(f"  {line}", err=True)
    if error.hint:
        click.echo(f"  try: {printable(error.hint)}", err=True)
    sys.exit(error.exit_code)


def call(config_path: Path | None, ask: Callable[[AgentClient], Awaitable[T]]) -> T:
    """Return the answer of this host's agent to a request."""
    from agent.client import AgentClient

    async def run() -> T:
        async with AgentClient(local_socket(load(config_path))) as client:
            return await ask(client)

    try:
        return asyncio.run(run())
    except KeyboardInterrupt:
        raise click.Abort from None
