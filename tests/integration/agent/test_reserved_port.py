"""The agent's port stays reserved while no agent runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.host.reserved_port import NAME, listen
from agent.machine import notify
from wire.errors import ConfigError

pytestmark = pytest.mark.behaviour("BUG-AG10")


class Keeper:
    """Emulates systemd's store of file descriptors."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.held: list[int] = []
        self.messages: list[str] = []

    def take(self) -> None:
        """Read the message, and keep the descriptors that came with it."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
            except BlockingIOError:
                return
            self.messages.append(data.decode())
            self.held += fds

    def close(self) -> None:
        self._socket.close()
        for fd in self.held:
            os.close(fd)


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    path = tmp_path / "notify"
    keeper = Keeper(path)
    monkeypatch.setenv("NOTIFY_SOCKET", str(path))
    yield keeper
    keeper.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


@pytest.mark.behaviour("BUG-AG10")
@pytest.mark.parametrize("option", [0, socket.SO_REUSEADDR])
def test_a_port_stays_reserved_while_the_agent_is_down(keeper: Keeper, option: int) -> None:
    """A socket with SO_REUSEADDR, which most servers set, took the port."""
    address = ("127.0.0.1", _free_port())
    listener = listen(address, 5)
    keeper.take()
    with socket.create_connection(address):
        pass
    listener.close()

    with socket.socket() as thief:
        if option:
            thief.setsockopt(socket.SOL_SOCKET, option, 1)
        with pytest.raises(OSError, match="in use"):
            thief.bind(address)


@pytest.mark.behaviour("BUG-AG10")
def test_a_call_during_startup_is_refused_at_once_and_the_host_is_alive(
    keeper: Keeper,
) -> None:
    address = ("127.0.0.1", _free_port())
    listen(address, 5).close()
    keeper.take()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_the_next_agent_listens_again_and_keeps_nothing_twice(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = ("127.0.0.1", _free_port())
    listen(address, 5).close()
    keeper.take()
    assert keeper.messages == [f"FDSTORE=1\nFDNAME={NAME}\nFDPOLL=0"]
    monkeypatch.setattr(notify, "_FIRST_FD", keeper.held[0])
    for name, value in (("PID", str(os.getpid())), ("FDS", "1"), ("FDNAMES", NAME)):
        monkeypatch.setenv(f"LISTEN_{name}", value)

    with listen(address, 5), socket.create_connection(address):
        keeper.take()
    assert len(keeper.messages) == 1

    other = ("127.0.0.1", _free_port())
    listen(other, 5).close()
    keeper.take()
    assert keeper.messages[1:] == [
        f"FDSTOREREMOVE=1\nFDNAME={NAME}",
        f"FDSTORE=1\nFDNAME={NAME}\nFDPOLL=0",
    ]


def test_a_taken_port_is_named(keeper: Keeper) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as theirs,
        pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already"),
    ):
        listen(theirs.getsockname()[:2], 5)
