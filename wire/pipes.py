"""Command groups that succeed when the reader of their output stops."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import click


class PipedGroup(click.Group):
    """Commands that exit with 0 when their reader stops early (`| head`).

    click itself exits with 1 in this case, before a caller can handle it.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        if sys.stdout is None:  # closed by the caller (`>&-`): discard the output
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 until the program ends
        if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters of reasons
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # the rest of the buffer is written at exit, and would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
