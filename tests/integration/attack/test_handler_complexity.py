"""No handler's work grows faster than its input, on any route of both programs.

Bodies are made from the types in the route tables. Each is valid and has one large field, and the
program has the objects that they name. Decoding and refusing are tested in
tests/unit/request_limits/test_request_complexity.py, parameters in test_long_parameters.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import json
import socket
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from http.client import HTTPConnection

import pytest

from agent.api import ImageFormat
from agent.client import AgentClient
from agent.identity import keys
from agent.routes import ROUTES as AGENT_ROUTES
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.routes import ROUTES
from control_plane.client import ControlPlaneClient
from wire.routes import Route

from .bodies import LARGE, Maker
from .target_process import SETTLES_S, Target, running
from .test_long_parameters import SMALL_S, worked_s

TIMES = 2
LINEAR = 1.5
"""Bound as a multiple of linear growth: quadratic growth is 2 times, sorting 1.1 times."""
MACHINES = 10_000
PARAMETERS = {
    "entitlement": "front",
    "job": "web",
    "task_id": "web-0",
    "plan": "p1",
    "digest": "sha256:" + "0" * 64,
}
CARRIED_OUT = {
    *("pull_image", "put_task"),
    *("join", "apply_job", "plan_job", "watch_endpoints", "import_machines", "drain_machines"),
    *("undrain_machines", "label_machines", "preview_plan", "request_entitlement", "create_token"),
    *("put_group", "put_entitlement"),
}
"""Routes that must accept their bodies here; the others get large bodies, too.

Not `put_profile`: its only large field is a text, which is refused unless the name has its digest.
"""
HEADER = "machine,datacenter,msb,row,rack,machine_type,cpus,memory\n"


def _image() -> bytes:
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("bin"))
        return file.getvalue()


IMAGE = _image()
CSR = keys.signing_request(keys.new_key(), "m0")
GENERATIONS = itertools.count(1)
DIGEST = "sha256:" + hashlib.sha256(IMAGE).hexdigest()


def rows(count: int) -> bytes:
    """Return an inventory in CSV."""
    lines = (f"m{n},dc1,msb{n % 7},row{n % 7},r{n // 40},t{n % 9},8,16G\n" for n in range(count))
    return (HEADER + "".join(lines)).encode()


@pytest.fixture(scope="module", params=["control plane", "agent"])
def prepared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    """A program that has the objects that the bodies name."""
    with running(request.param, tmp_path_factory.mktemp("growth")) as target:
        asyncio.run(_prepare(target))
        yield target


async def _prepare(target: Target) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield IMAGE

    at = f"unix:{target.socket}"
    if target.kind == "agent":
        async with AgentClient(at) as agent:
            await agent.put_image(DIGEST, ImageFormat.TAR, chunks())
        return
    async with ControlPlaneClient(at) as client:
        status, body_text = send_request(
            target, "POST", "/v1/machines:import?format=csv", rows(MACHINES)
        )
        assert status == 200, body_text
        await client.put_entitlement("front", EntitlementSpec(machines=3))
        await client.push_image(DIGEST, ImageFormat.TAR, chunks())


def send_request(target: Target, method: str, at: str, body: bytes) -> tuple[int, bytes]:
    """Return status and answer of a request on the local socket, which may call everything."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(SETTLES_S)
    sock.connect(str(target.socket))
    http = HTTPConnection("x")
    http.sock = sock
    with closing(http):
        http.request(method, at, body)
        answer = http.getresponse()
        return answer.status, answer.read()


def address(route: Route) -> str:
    path = route.path
    for name in route.parameters:
        path = path.replace(f"{{{name}}}", PARAMETERS.get(name, "x"))
    return path + ("?dry_run=1" if "dry_run" in route.query else "")


def requests(target: Target, route: Route, size: int) -> dict[str, bytes]:
    """Return the bodies of one size by their large field."""
    if route.name == "import_machines":
        return {"rows": rows(MACHINES * size // LARGE)}
    if route.stream_in:
        return {"bytes": bytes((8 << 20) * size // LARGE)}
    maker = Maker({"image": DIGEST, "digest": DIGEST, "csr_pem": CSR}, GENERATIONS)
    return {what: json.dumps(body).encode() for what, body in maker.bodies(route.request, size)}


def fresh(target: Target, route: Route, body: bytes) -> bytes:
    """Return a body with new single-use values: a token, a generation."""
    if route.name == "join":
        token_request = json.dumps({"machine": "m0"}).encode()
        status, body_text = send_request(target, "POST", "/v1/tokens", token_request)
        assert status == 200, body_text
        return json.dumps(json.loads(body) | {"token": json.loads(body_text)["token"]}).encode()
    if route.name == "put_task":
        return json.dumps(json.loads(body) | {"generation": next(GENERATIONS)}).encode()
    return body


def work_s(target: Target, route: Route, body: bytes) -> tuple[float, int]:
    body = fresh(target, route, body)
    began = worked_s(target)
    status, answer = send_request(target, route.method, address(route), body)
    assert status < 500 or status == 503, (route.name, body[:300], answer[:300])
    return worked_s(target) - began, status


def growth(target: Target, route: Route, small: bytes, large: bytes) -> float:
    """Return the cost of the larger body over that of the smaller one.

    Requests are repeated, also if their result exists already. Other programs share this computer,
    so the smallest of several measurements counts, and a bad one is repeated.
    """
    for _ in range(4):
        small_s = min(work_s(target, route, small)[0] for _ in range(3))
        large_s = min(work_s(target, route, large)[0] for _ in range(3))
        if large_s < LINEAR * TIMES * small_s:
            break
    return large_s / small_s


@pytest.mark.behaviour("BUG-HT3")
def test_the_work_of_a_handler_is_bounded_by_its_input(prepared: Target) -> None:
    """The bodies are made from the route tables; a valid one costs its size."""
    target = prepared
    statuses: dict[str, set[int]] = {}
    for route in AGENT_ROUTES if target.kind == "agent" else ROUTES:
        if route.request is None and not route.stream_in:
            continue
        small = requests(target, route, LARGE // TIMES)
        for what, body in requests(target, route, LARGE).items():
            large_s, status = work_s(target, route, body)
            statuses.setdefault(route.name, set()).add(status)
            if large_s < SMALL_S or what not in small:
                continue
            found = growth(target, route, small[what], body)
            assert found < LINEAR * TIMES, (route.name, what, found)
    refused = {name for name, found in statuses.items() if not {200, 202} & found}
    assert not refused & CARRIED_OUT
