"""Requests to the program that changes the network, and what an operator reads if they fail."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from agent.machine.private_network import HostNetwork
from agent.netplan import NetAnswer, NetRequest
from wire.errors import HostError


def answered(tmp_path: Path, answer: bytes) -> NetAnswer:
    """Send a request to a program that answers with these bytes and ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                lines.readline()
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return HostNetwork(str(tmp_path / "s")).ask(NetRequest())
        finally:
            thread.join()


@pytest.mark.behaviour("BUG-AG73")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "^twine-network.service ended without an answer$"),
        (b'{"error":"no sit"}\n', "^no sit$"),
        (b"\xff\n", "^cannot send a network request to twine-network.service: "),
    ],
)
def test_a_failed_request_has_its_reason(tmp_path: Path, answer: bytes, message: str) -> None:
    with pytest.raises(HostError, match=message):
        answered(tmp_path, answer)


def test_an_answer_has_the_networks(tmp_path: Path) -> None:
    assert answered(tmp_path, b'{"lacks":"no sit"}\n') == NetAnswer(lacks="no sit")
