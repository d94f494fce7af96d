"""The cost of a path or query parameter is bounded by its size, on any route of both programs.

Bodies are tested in tests/unit/request_limits/test_request_complexity.py. The HTTP server bounds
the request line, so this test covers the sizes below that bound.
"""

from __future__ import annotations

import socket
import time
from contextlib import closing, suppress
from http.client import HTTPConnection
from urllib.parse import quote

import pytest

from agent.routes import ROUTES as AGENT_ROUTES
from control_plane.api.routes import ROUTES
from wire.routes import Route

from .target_process import SETTLES_S, Target

SMALL, TIMES = 750, 8
"""Characters of the smaller value; the larger one just fits the request line."""
SMALL_S = 0.05
"""Less work than this is not judged."""
LINEAR = 3.0
"""Bound as a multiple of linear growth; quadratic growth is eight times."""
VALUES = ("a", "a-", "9", "1.", "(", "!a", "a=b,", "a in (b),", "-/")
PLAIN = {"digest": "sha256:" + "0" * 64, "index": "0"}
PLAINLY = "!(),=-"
"""Characters that need no escape, and so no extra space in the line."""


def request_target(route: Route, parameter: str, value: str) -> str:
    """Return the route's address with one long parameter."""
    path = route.path
    for name in route.parameters:
        text = value if name == parameter else PLAIN.get(name, "vm1")
        path = path.replace(f"{{{name}}}", quote(text, safe=PLAINLY))
    return path if parameter in route.parameters else f"{path}?{parameter}={quote(value, PLAINLY)}"


def request_status(target: Target, method: str, at: str) -> int:
    """Return the status of a request on the local socket, which may call everything."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(SETTLES_S)
    sock.connect(str(target.socket))
    http = HTTPConnection("x")
    http.sock = sock
    with closing(http):
        http.request(method, at)
        return http.getresponse().status


def worked_s(target: Target) -> float:
    """Return the CPU time of the process so far."""
    return time.clock_gettime((~target.process.pid << 3) | 2)


def work_s(target: Target, route: Route, parameter: str, unit: str, size: int) -> float:
    """Return the CPU time of the cheapest of some requests; none may be answered with a 5xx."""
    found = []
    for _ in range(3):
        began = worked_s(target)
        status = request_status(
            target, route.method, request_target(route, parameter, (unit * size)[:size])
        )
        found.append(worked_s(target) - began)
        assert status != 500, (route.name, parameter, unit, size, status)
        if found[-1] < SMALL_S:
            break
    return min(found)


@pytest.mark.behaviour("BUG-HT3")
def test_the_work_of_a_parameter_grows_with_its_size(target: Target) -> None:
    """The requests are made from the route tables, for each parameter of each route."""
    for route in AGENT_ROUTES if target.kind == "agent" else ROUTES:
        for parameter in (*route.parameters, *route.query):
            for unit in VALUES:
                size = SMALL * TIMES
                while len(request_target(route, parameter, (unit * size)[:size])) > 7500:
                    size //= 2
                large = work_s(target, route, parameter, unit, size)
                if large < SMALL_S:
                    continue
                small = work_s(target, route, parameter, unit, size // TIMES)
                assert large < LINEAR * TIMES * small, (route.name, parameter, unit, small, large)


@pytest.mark.behaviour("BUG-HT3")
@pytest.mark.parametrize("at", ["/v1/jobs/{}", "/v1/tasks/{}", "/v1/machines?where={}"])
def test_a_line_without_end_is_refused(target: Target, at: str) -> None:
    """The test above relies on this bound."""
    with suppress(ConnectionError):
        assert request_status(target, "GET", at.format("a" * 20_000)) in (400, 414)
