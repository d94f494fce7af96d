"""No input of a client causes a 500, a hang or a crash (P7, F-76, F-77).

The control plane behind the front end is the real one, on the in-memory store.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from agent.api import ImageFormat, ImageInfo
from control_plane.agents.polled import PolledAgent, PollPatience
from control_plane.api.jobs import JobSpec
from control_plane.api.machines import MachineRecord
from control_plane.api.routes import ROUTES
from control_plane.api.settings import SchedulerSettings
from control_plane.front_end.access import Access
from control_plane.front_end.frontend import FrontEnd
from control_plane.front_end.trail import Trail
from control_plane.identity.authority import OwnIdentity, open_authority
from control_plane.identity.people import People
from control_plane.identity.registrar import Registrar
from control_plane.images.store import ImageStore
from control_plane.roles import ControlPlane
from control_plane.runtime.runtime import Runtime
from control_plane.store.memory import MemoryStore
from wire.fairness import MAX_BODY_BYTES
from wire.listen import serving, tcp_socket, unix_socket

pytestmark = pytest.mark.behaviour("F-76", "F-77")

DIGEST = "sha256:" + "a" * 64
JOB: dict[str, Any] = {
    "name": "web",
    "entitlement": "front",
    "tasks": 1,
    "image": DIGEST,
    "command": ["/bin/true"],
}


class Real:
    """The real control plane on a unix socket, and one client loop for all examples."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "cp.sock"
        self.loop = asyncio.new_event_loop()
        self._folder = folder
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._server = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._server) as runner:
            runner.run(self._serve())

    def __enter__(self) -> Real:
        self._thread.start()
        assert self._ready.wait(10)
        self.session = self.loop.run_until_complete(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.run_until_complete(self.session.close())
        self.loop.close()
        self._server.call_soon_threadsafe(self._stop.set)
        self._thread.join(15)

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(self.path)))

    async def _serve(self) -> None:
        async def find(digest: str) -> ImageInfo | None:
            if digest != DIGEST:
                return None
            return ImageInfo(digest=digest, format=ImageFormat.TAR, stream_bytes=1, created_at=0.0)

        def no_agent(record: MachineRecord) -> PolledAgent:
            return PolledAgent("https://127.0.0.1:9", None, Runtime(), PollPatience(3.0, 5.5))

        authority = open_authority(self._folder / "a.pem", "twine")
        own = OwnIdentity(authority, ["127.0.0.1"])
        store = MemoryStore()
        control_plane = ControlPlane(store, no_agent, Runtime(), SchedulerSettings(), find)
        registrar = Registrar(store, authority, control_plane, "https://x", Runtime())
        images = ImageStore(self._folder / "images", time.time, 1 << 20)
        people, trail = People(store, Runtime()), Trail(store, Runtime())
        front_end = FrontEnd(control_plane, registrar, images, people, trail)
        app = front_end.app(Access(os.getuid()), "0")
        sockets = tcp_socket("127.0.0.1", 0), unix_socket(self.path)
        async with (
            store,
            control_plane,
            serving(app, sockets[0], own.server_context(), sockets[1]),
        ):
            self._ready.set()
            await self._stop.wait()

    def send(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        async def send() -> tuple[int, bytes]:
            timeout = aiohttp.ClientTimeout(total=10)
            url = aiohttp.client.URL(f"http://x{path}", encoded=True)
            async with self.session.request(
                method, url, data=io.BytesIO(body), timeout=timeout
            ) as answer:
                return answer.status, await answer.read()

        return self.loop.run_until_complete(send())

    def raw(self, data: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(self.path))
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            while chunk := sock.recv(65_536):
                answer += chunk
        return answer


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with Real(tmp_path_factory.mktemp("real")) as server:
        quota = json.dumps({"machines": 2}).encode()
        assert server.send("PUT", "/v1/entitlements/front", quota)[0] == 200
        yield server


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A client's mistake is no error of the control plane, and leaves no traceback in its log."""
    yield
    assert [r for r in caplog.get_records("call") if r.levelno >= logging.ERROR] == []


NAMES = st.sampled_from(["web", "front", "vm1", "nothing", "0", DIGEST]) | st.text(max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    [*JobSpec.__struct_fields__, "machines", "machine", "ttl_s", "token", "csr_pem", "address"]
)
BODIES = (
    st.binary(max_size=64)
    | VALUES.map(lambda v: json.dumps(v).encode())
    | st.dictionaries(FIELDS, VALUES).map(lambda d: json.dumps(JOB | d).encode())
)
TEXTS = st.sampled_from(["", "0", "1", "-1", "nan", "1e400", "true", "tar", "x", "９"]) | st.text(
    max_size=6
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, bytes]:
    route = draw(st.sampled_from(ROUTES))
    path = route.path
    for name in route.parameters:
        path = path.replace(f"{{{name}}}", quote(draw(NAMES) or "-", safe=""))
    # Parameters for waiting: the control plane obeys them, which would make the test slow.
    query = {n: draw(TEXTS) for n in route.query if n not in ("wait_s", "follow")}
    pairs = "&".join(f"{k}={quote(v, safe='')}" for k, v in query.items())
    return route.method, f"{path}?{pairs}" if pairs else path, draw(BODIES)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(requests())
def test_no_request_makes_a_500(real: Real, request_: tuple[str, str, bytes]) -> None:
    method, path, body = request_
    status, answer = real.send(method, path, body)
    assert status != 500, (method, path, body, answer)
    if status >= 400:
        problem = json.loads(answer)
        assert problem["code"] != "internal"
        assert problem["detail"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 500_000, 400),
        (b'{"command":' * 80_000, 400),
        (b'{"name":"\\ud800"}', 400),
        (b'{"tasks":1e999}', 400),
        (b"NaN", 400),
        (b"\xff\xfe{\x00}\x00", 400),
        (json.dumps(JOB | {"command": ["x" * 200_000]}).encode(), 400),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
def test_a_hostile_body_is_refused(real: Real, body: bytes, status: int) -> None:
    """How the work grows with a body is in attack/test_handler_complexity.py."""
    found, answer = real.send("PUT", "/v1/jobs/web", body)
    assert found == status, answer


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PUT /v1/jobs/web HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x",
        b"PUT /v1/jobs/web HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PUT /v1/jobs/web HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nshort",
        b"PUT /v1/images/" + DIGEST.encode() + b" HTTP/1.1\r\nHost: x\r\n"
        b"Content-Length: 100\r\n\r\nshort",
        b"PUT /v1/images/" + DIGEST.encode() + b" HTTP/1.1\r\nHost: x\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nshort\r\nzz",
        b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"",
    ],
)
def test_broken_http_is_refused_and_the_server_continues(real: Real, request_: bytes) -> None:
    answer = real.raw(request_)
    assert b" 500 " not in answer.partition(b"\r\n")[0]
    assert real.send("GET", "/healthz")[0] == 200


def test_the_document_of_the_api_is_valid_and_complete(real: Real) -> None:
    status, body = real.send("GET", "/openapi.json")
    assert status == 200
    document = json.loads(body)
    assert document["openapi"] == "3.1.0"
    found = {o["operationId"] for p in document["paths"].values() for o in p.values()}
    assert found == {r.name for r in ROUTES}
    schemas = document["components"]["schemas"]
    for reference in set(_references(document)):
        assert reference.rpartition("/")[2] in schemas, reference
    for path, operations in document["paths"].items():
        for operation in operations.values():
            named = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
            assert named == {part[1:-1].partition("}")[0] for part in _placeholders(path)}


@pytest.mark.behaviour("AL24")
def test_metrics_count_by_route_and_status(real: Real) -> None:
    before = _samples(real).get(("twine_requests_total", "get_job", "404"), 0.0)
    real.send("GET", "/v1/jobs/nothing")
    samples = _samples(real)
    assert samples["twine_requests_total", "get_job", "404"] == before + 1
    assert samples["twine_machines", "up"] == samples["twine_allocator_machines",] == 0  # AL24
    assert samples["twine_machines_held_back",] == 0


def _samples(real: Real) -> dict[tuple[str, ...], float]:
    """Return the scraped metrics by name and label values."""
    text = real.send("GET", "/metrics")[1].decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "$ref":
                yield item
            else:
                yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _placeholders(path: str) -> list[str]:
    return ["{" + part.partition("}")[0] + "}" for part in path.split("{")[1:]]


@pytest.mark.behaviour("BUG-HT3", "BUG-HT7")
@pytest.mark.parametrize("path", ["/v1/machines:import", "/v1/join"])
def test_a_compressed_body_is_refused_and_not_unpacked(shared: Any, path: str) -> None:
    """Regression: 58 KB of gzip at an import took 17 GB of memory. A plain body that declares gzip
    was a 500.
    """

    async def post(body: bytes) -> tuple[int, str]:
        async with shared.client() as client:
            headers = {"Content-Encoding": "gzip"}
            url = f"http://local{path}"
            async with client._open().post(url, data=body, headers=headers) as answer:
                return answer.status, (await answer.json())["detail"]

    bomb = gzip.compress(bytes(64 << 20))
    assert len(bomb) < 80_000
    for body in (bomb, b"plain"):
        assert asyncio.run(post(body)) == (400, "a compressed body is not supported")


@pytest.mark.behaviour("BUG-HT27")
def test_an_impossible_expectation_is_refused(real: Real) -> None:
    """The refusal is a problem document; `Expect: 100-continue` still works."""
    head = b"PUT /v1/entitlements/front HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    body = json.dumps({"machines": 2}).encode()
    length = b"Content-Length: %d\r\n" % len(body)
    refused = real.raw(head + length + b"Expect: 200-maybe\r\n\r\n" + body)
    assert refused.startswith(b"HTTP/1.1 417 ")
    assert b"application/problem+json" in refused
    problem = json.loads(refused.partition(b"\r\n\r\n")[2])
    assert (problem["code"], problem["status"]) == ("expectation_failed", 417)
    taken = real.raw(head + length + b"Expect: 100-continue\r\n\r\n" + body)
    assert taken.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
