"""Commands inside running tasks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.cli.program import call

if TYPE_CHECKING:
    from agent.client import AgentClient


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.option(
    "-t", "--tty/--no-tty", default=None, help="Use a terminal; by default if this one is."
)
@click.option("-i", "--stdin/--no-stdin", default=True, help="Forward input; the default.")
@click.argument("command", nargs=-1, required=True)
@click.pass_obj
def exec_task(
    config_path: Path | None, name: str, tty: bool | None, stdin: bool, command: tuple[str, ...]
) -> None:
    """Run COMMAND inside task NAME, with the task's rights and limits. Put -- before it.

    Ends with the command's exit code, or 128 and the number of the signal that ended it.
    """
    from agent.terminal import is_terminal, run_session, window

    terminal = is_terminal() if tty is None else tty

    async def run(client: AgentClient) -> int:
        size = window()
        session = client.exec_task(
            name, list(command), tty=terminal, rows=size.rows, columns=size.columns
        )
        async with session as duplex:
            return await run_session(duplex, terminal=terminal, with_input=stdin)

    sys.exit(call(config_path, run))
