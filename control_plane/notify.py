"""Notifications of the control plane to the service manager (sd_notify(3))."""

from __future__ import annotations

import logging
import os
import socket

import click

log = logging.getLogger(__name__)

SEND_S = 0.5
"""Longest wait for a service manager whose queue of messages is full."""


def notify(state: str) -> None:
    """Send a state to systemd; does nothing outside of systemd (sd_notify(3)).

    A service manager that is gone or hangs neither ends nor blocks the caller.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(SEND_S)
            sock.connect(f"\0{path[1:]}" if path[0] == "@" else path)
            sock.send(state.encode())
    except OSError as e:
        log.warning("cannot send %s to the service manager: %s", state.partition("\n")[0], e)


def standing_by(leader: str) -> None:
    """Report to systemd that this process is ready and waits, to prevent a timeout of its start."""
    notify(f"READY=1\nSTATUS=standing by, {leader} leads")
    click.echo(f"standing by: {leader} leads", err=True)
