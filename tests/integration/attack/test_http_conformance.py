"""Every input is answered according to HTTP, with a problem document."""

from __future__ import annotations

import json
import socket

import pytest

from .target_process import Target

pytestmark = pytest.mark.behaviour("BUG-HT10", "BUG-HT4")


def answered(
    target: Target, request: bytes, *, half_close: bool = False
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the response to these bytes on the unix socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(target.socket))
        sock.sendall(request)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        data = b""
        while chunk := sock.recv(65_536):
            data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]) if " " in first else 0, headers, body


CLOSE = b"Host: x\r\nConnection: close\r\n\r\n"


@pytest.mark.behaviour("BUG-HT10")
def test_an_unsupported_method_is_refused_with_the_supported_ones(target: Target) -> None:
    """Regression: a 405 had no `Allow`."""
    status, headers, body = answered(target, b"DELETE /readyz HTTP/1.1\r\n" + CLOSE)
    assert (status, headers["Allow"]) == (405, "GET")
    assert json.loads(body)["code"] == "no_such_method"


@pytest.mark.behaviour("BUG-HT10")
@pytest.mark.parametrize(
    "request_",
    [
        b"GET /readyz HTTP/1.1\r\n" + CLOSE,
        b"GET /nothing HTTP/1.1\r\n" + CLOSE,
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000 + b"\r\n\r\n",
        b"POST /readyz HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n" + CLOSE,
        b"GET /readyz\r\n\r\n",
    ],
)
def test_no_answer_discloses_versions_and_every_refusal_is_a_problem(
    target: Target, request_: bytes
) -> None:
    """Regression: `Server:` disclosed versions, and some errors were plain text."""
    status, headers, body = answered(target, request_)
    assert headers["Server"] == "Twine"
    assert status in (200, 400, 404)
    if status != 200:
        assert headers["Content-Type"].startswith("application/problem+json")
        assert json.loads(body)["detail"]


@pytest.mark.behaviour("BUG-HT10")
def test_a_half_closed_client_is_answered(target: Target) -> None:
    """Regression: a client that closed its sending side got no answer."""
    request = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"
    assert answered(target, request, half_close=True)[0] == 200


@pytest.mark.behaviour("BUG-HT4")
def test_an_incomplete_body_is_refused(target: Target) -> None:
    """The part that arrived is not taken for the whole body."""
    path = b"/v1/profile" if target.kind == "agent" else b"/v1/groups/web"
    request = b"PUT " + path + b' HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"name":'
    status, _, body = answered(target, request, half_close=True)
    assert (status, json.loads(body)["code"]) == (400, "invalid_input")


@pytest.mark.behaviour("F-76")
def test_a_huge_body_is_refused_at_its_limit(target: Target) -> None:
    """A body of a gigabyte takes a megabyte of memory at most."""
    path = b"/v1/profile" if target.kind == "agent" else b"/v1/groups/web"
    before = target.memory()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(target.socket))
        sock.sendall(b"PUT " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        sent = 0
        try:
            while sent < 64 << 20:
                sent += sock.send(b" " * 65_536)
        except OSError:
            pass
    assert target.memory() < before + (48 << 20)
