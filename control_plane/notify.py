"""Notifications of the control plane to the service manager (sd_notify(3))."""

from __future__ import annotations

import os
import socket

import click


def notify(state: str) -> None:
    """Send a state to systemd; does nothing outside of systemd (sd_notify(3))."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), f"\0{path[1:]}" if path[0] == "@" else path)


def standing_by(leader: str) -> None:
    """Report to systemd that this process is ready and waits, to prevent a timeout of its start."""
    notify(f"READY=1\nSTATUS=standing by, {leader} leads")
    click.echo(f"standing by: {leader} leads", err=True)
