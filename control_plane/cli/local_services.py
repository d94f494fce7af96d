"""Calls of the programs that serve a unix socket on this host: the autoscaler and Optimus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

from control_plane.cli.program import ask

if TYPE_CHECKING:
    from wire.client import WireClient


def socket_option(program: str, variable: str, default: str) -> Callable[[Any], Any]:
    """Return the option for the socket of a program."""
    return click.option(
        "--socket",
        envvar=variable,
        default=default,
        show_default=True,
        metavar="PATH",
        help=f"Socket of {program}.",
    )


def ask_service(
    socket: str, work: Callable[[WireClient], Awaitable[Any]], timeout_s: float = 30.0
) -> Any:
    """Call the program behind a socket and return its answer."""
    from wire.client import WireClient

    endpoint = f"unix:{socket.removeprefix('unix:')}"  # also written like other endpoints
    return ask(lambda: WireClient(endpoint, timeout_s=timeout_s), work)
