"""A program whose reader goes away."""

from __future__ import annotations

import os
import sys
from typing import Any

import click


class PipedGroup(click.Group):
    """Commands that succeed where their reader stops (`| head`): it has what it wanted.

    click itself exits with 1 there, before a caller can handle it.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        if sys.stdout is None:  # closed by the caller (`>&-`): what is printed is not wanted
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 until the program ends
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # what is left in the buffer is written at exit, and would fail once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
