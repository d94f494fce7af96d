"""`twine-resolver` as a process with a real front end, real HAProxy and nginx, real DNS."""

from __future__ import annotations

import asyncio
import http.client
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import dns.message
import dns.query
import dns.rcode
import pytest
from msgspec.structs import replace

from control_plane.api.endpoints import Endpoint
from control_plane.job_control.core.traffic import weights_of
from tests.ports import free_port

from .conftest import Region

PATIENCE_S = 120.0
OWN_CONFIGURATION = """
global
    stats socket {folder}/haproxy.sock mode 600 level admin expose-fd listeners
defaults
    mode http
    timeout connect 60s
    timeout client 60s
    timeout server 60s
    option redispatch
"""
NGINX_CONFIGURATION = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log stderr;
events {{}}
http {{ access_log off; include {folder}/twine.cfg; }}
"""


@pytest.fixture
def region(shared: Region) -> Region:
    """All tests share one front end, because its shutdown waits for clients of long polls."""
    shared.control_plane.served.clear()
    return shared


class Task(BaseHTTPRequestHandler):
    """Answers with the name of the task; counts its requests."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, TaskServer)
        server.requests += 1
        body = server.task.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing."""


class TaskServer(ThreadingHTTPServer):
    """One task of a job, on a port of the loopback."""

    def __init__(self, task: str) -> None:
        super().__init__(("127.0.0.1", 0), Task)
        self.task = task
        self.requests = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def endpoint(self) -> Endpoint:
        ports = {"http": self.server_address[1]}
        return Endpoint(task=self.task, machine="m1", host="127.0.0.1", ports=ports, version=1)


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


@contextmanager
def running(*argv: str | Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([str(a) for a in argv], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)
        assert process.stderr is not None
        process.stderr.close()


def resolver(region: Region, *words: str) -> list[str]:
    endpoint = f"unix:{region.socket}"
    return [sys.executable, "-m", "resolver.cli", "--endpoint", endpoint, *words]


def get(port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/")
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def answers(port: int) -> str:
    try:
        return get(port)[1]
    except OSError:
        return ""


@pytest.fixture
def tasks() -> Iterator[list[TaskServer]]:
    servers = [TaskServer(f"web-{i}") for i in range(4)]
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


class Traffic:
    """Constant requests to one port, each on a new connection."""

    def __init__(self, port: int) -> None:
        self.seen: list[tuple[int, str]] = []
        self.failed: list[str] = []
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            try:
                self.seen.append(get(self._port))
            except (OSError, http.client.HTTPException) as e:
                self.failed.append(repr(e))

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def next(self, count: int) -> list[str]:
        """Return the tasks that answer the next requests."""
        begin = len(self.seen) + 1  # the present request may have begun before
        until(lambda: len(self.seen) >= begin + count)
        return [page for _, page in self.seen[begin : begin + count]]


@pytest.mark.behaviour("SD1")
def test_haproxy_follows_a_job_without_a_failed_request(
    region: Region, tasks: list[TaskServer], tmp_path: Path
):
    """Behind a proxy no request goes to a task after it is unlisted, and none fails."""
    haproxy = shutil.which("haproxy", path="/usr/sbin:/usr/bin")
    assert haproxy
    old, new = tasks[:2], tasks[2:]
    region.run(region.control_plane.serve(*(t.endpoint() for t in old)))
    port, own, file = free_port(), tmp_path / "own.cfg", tmp_path / "twine.cfg"
    own.write_text(OWN_CONFIGURATION.format(folder=tmp_path))
    service = f"web:http=127.0.0.1:{port}"
    once = resolver(region, "proxy", "haproxy", service)
    file.write_text(subprocess.run(once, check=True, capture_output=True, text=True).stdout)
    with ExitStack() as stack:
        proxy = stack.enter_context(running(haproxy, "-W", "-f", own, "-f", file))
        until(lambda: answers(port))
        stack.enter_context(
            running(
                *resolver(region, "proxy", "haproxy", service, "--file", str(file)),
                *("--check", f"{haproxy} -q -c -f {own} -f {{file}}"),
                *("--reload", f"kill -USR2 {proxy.pid}"),
            )
        )
        traffic = stack.enter_context(Traffic(port))
        assert set(traffic.next(20)) == {"web-0", "web-1"}
        for listed in ([*old, *new], new, [new[1]], [*old, new[0]]):
            region.run(region.control_plane.serve(*(t.endpoint() for t in listed)))
            names = {t.task for t in listed}
            until(lambda names=names: set(traffic.next(20)) == names)
    assert traffic.failed == []
    assert {status for status, _ in traffic.seen} == {200}


def test_nginx_accepts_the_written_file(region: Region, tasks: list[TaskServer], tmp_path: Path):
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin")
    assert nginx
    region.run(region.control_plane.serve(tasks[0].endpoint()))
    port, own, file = free_port(), tmp_path / "nginx.conf", tmp_path / "twine.cfg"
    own.write_text(NGINX_CONFIGURATION.format(folder=tmp_path))
    service = f"web:http=127.0.0.1:{port}"
    once = resolver(region, "proxy", "nginx", service, "gone:http")
    file.write_text(subprocess.run(once, check=True, capture_output=True, text=True).stdout)
    with running(nginx, "-p", tmp_path, "-c", own):
        until(lambda: answers(port))
        assert get(port) == (200, "web-0")


@pytest.mark.behaviour("JC10")
@pytest.mark.parametrize("name", ["haproxy", "nginx"])
@pytest.mark.parametrize("traffic", [0.1, 0.0])
def test_a_canary_gets_its_part_of_the_requests_of_a_real_proxy(
    region: Region, tasks: list[TaskServer], tmp_path: Path, name: str, traffic: float
):
    """One of four tasks gets a tenth of 200 requests, or none."""
    program = shutil.which(name, path="/usr/sbin:/usr/bin")
    assert program
    own, other = weights_of(traffic, 1, len(tasks) - 1)
    weights = [own, *([other] * (len(tasks) - 1))]
    served = [replace(t.endpoint(), weight=w) for t, w in zip(tasks, weights, strict=True)]
    region.run(region.control_plane.serve(*served))
    port, file, conf = free_port(), tmp_path / "twine.cfg", tmp_path / "own.cfg"
    once = resolver(region, "proxy", name, f"web:http=127.0.0.1:{port}")
    file.write_text(subprocess.run(once, check=True, capture_output=True, text=True).stdout)
    if name == "haproxy":
        conf.write_text(OWN_CONFIGURATION.format(folder=tmp_path))
        argv = (program, "-f", conf, "-f", file)
    else:
        conf.write_text(NGINX_CONFIGURATION.format(folder=tmp_path))
        argv = (program, "-p", tmp_path, "-c", conf)
    with running(*argv):
        until(lambda: answers(port))
        before = [task.requests for task in tasks]
        pages = [get(port) for _ in range(200)]
    assert {status for status, _ in pages} == {200}
    requests = [task.requests - was for task, was in zip(tasks, before, strict=True)]
    assert abs(requests[0] - 200 * traffic) <= 3
    assert all(abs(count - 200 * (1 - traffic) / 3) <= 5 for count in requests[1:])


def test_a_file_refused_by_the_check_is_never_installed(region: Region, tmp_path: Path):
    """A file that a proxy cannot read would stop the proxy at its next start."""
    file, log = tmp_path / "twine.cfg", tmp_path / "reloaded"
    region.run(region.control_plane.serve())
    check = tmp_path / "check"
    check.write_text("#!/bin/sh\n! grep -q web-7 \"$1\" || { echo 'no web-7 please'; exit 1; }\n")
    check.chmod(0o755)
    argv = [
        *resolver(region, "proxy", "haproxy", "web:http", "--file", str(file)),
        *("--check", f"{check} {{file}}", "--reload", f"sh -c 'echo x >> {log}'"),
    ]
    with running(*argv) as process:
        until(log.exists)
        good = file.read_text()
        bad = Endpoint(task="web-7", machine="m", host="::1", ports={"http": 7}, version=1)
        region.run(region.control_plane.serve(bad))
        assert process.stderr is not None
        refused = next(line for line in process.stderr if "could not be updated" in line)
        assert "no web-7 please" in refused
        assert file.read_text() == good
        assert log.read_text() == "x\n"
        fine = Endpoint(task="web-8", machine="m", host="::1", ports={"http": 8}, version=1)
        region.run(region.control_plane.serve(fine))
        until(lambda: "web-8" in file.read_text() and log.read_text() == "x\nx\n")
    assert sorted(p.name for p in tmp_path.glob(".*")) == []


@pytest.mark.behaviour("SD3")
def test_dns_over_udp_and_tcp(region: Region, tasks: list[TaskServer]):
    """A client that uses only DNS finds a job's tasks and their ports."""
    region.run(region.control_plane.serve(tasks[0].endpoint()))
    argv = resolver(region, "dns", "--listen", "127.0.0.1:0", "--zone", "twine.test")
    with running(*argv) as process:
        assert process.stderr is not None
        port = int(process.stderr.readline().rpartition(":")[2])

        def ask(name: str, kind: str, tcp: bool = False) -> dns.message.Message:
            query = dns.message.make_query(name, kind)
            via = dns.query.tcp if tcp else dns.query.udp
            return via(query, "127.0.0.1", timeout=PATIENCE_S, port=port)

        for tcp in False, True:
            [address] = ask("web.twine.test", "A", tcp).answer[0]
            [service] = ask("_http._tcp.web.twine.test", "SRV", tcp).answer[0]
            assert address.address == "127.0.0.1"
            assert service.port == tasks[0].server_address[1]
            assert str(service.target) == "web-0.web.twine.test."
        assert ask("api.twine.test", "A").rcode() == dns.rcode.NXDOMAIN
        region.run(region.control_plane.serve(tasks[1].endpoint()))
        until(lambda: ask("web-1.web.twine.test", "A").answer)
        assert ask("web-0.web.twine.test", "A").rcode() == dns.rcode.NXDOMAIN

        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(b"\x00\x30half a message")
            assert ask("web.twine.test", "A", tcp=True).answer  # no client waits for it


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("dns", "--listen", "nowhere"), "not a listen address"),
        (("dns", "--zone", "a..b"), "not a name of a zone"),
        (("dns", "--zone", "."), "root cannot be the zone"),
        (("dns", "--ttl", "2h"), "--ttl 2h"),
        (("proxy", "haproxy", "web"), "does not name a port of a job"),
        (("proxy", "haproxy", "web:http", "--reload", "true"), "about a file"),
    ],
)
def test_all_errors_are_reported_together(region: Region, words: tuple[str, ...], why: str):
    done = subprocess.run(resolver(region, *words), capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert why in done.stderr


def test_a_taken_port_is_reported(region: Region):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        argv = resolver(region, "dns", "--listen", at)
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert f"cannot listen at {at}: " in done.stderr
    assert "already in use" in done.stderr


def test_an_unreachable_front_end_is_reported(tmp_path: Path):
    """A single run prints no endpoints without an answer of the front end."""
    argv = [sys.executable, "-m", "resolver.cli", "--endpoint", f"unix:{tmp_path}/no.sock"]
    done = subprocess.run(
        [*argv, "proxy", "nginx", "web:http"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 69
    assert done.stdout == ""
    assert "web" in done.stderr


def test_the_canned_front_end_waits_as_the_real_one_does(region: Region):
    """The tests above rely on this."""
    canned = region.control_plane
    region.run(canned.serve())
    news = region.run(canned.watch_endpoints({"web": 1}, wait_s=0.01))
    assert (news.changed, news.missing) == ([], [])

    async def later() -> int:
        waiting = asyncio.create_task(canned.watch_endpoints({"web": 1}, wait_s=60))
        await asyncio.sleep(0)
        await canned.serve()
        return (await waiting).changed[0].revision

    assert region.run(later()) == 2
