"""Messages to a service manager that is gone or hangs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.machine import notify as descriptors
from control_plane.process import standing_by
from wire import notify

pytestmark = pytest.mark.behaviour("BUG-AG121")

CALLS: list[Callable[[], None]] = [
    lambda: notify.notify(notify.WATCHDOG),
    lambda: notify.notify("READY=1"),
    lambda: descriptors.drop_descriptor("name"),
    lambda: descriptors.store_descriptor("name", 0),
    lambda: standing_by("another"),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_service_manager_whose_socket_is_gone_ends_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], None], is_closed: bool
) -> None:
    """The variable may be inherited from a service that has ended, or the socket removed."""
    path = tmp_path / "notify"
    if is_closed:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as closed:
            closed.bind(str(path))
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    call()


@pytest.mark.parametrize("call", CALLS)
def test_a_service_manager_that_reads_no_messages_blocks_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]
) -> None:
    """A PID 1 that hung stopped the fence once the queue was full, so no task was killed."""
    path = tmp_path / "notify"
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    monkeypatch.setattr(notify, "SEND_S", 0.01)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as others,
    ):
        manager.bind(str(path))
        with contextlib.suppress(BlockingIOError):
            while others.sendto(b"x", str(path)):
                pass
        call()
