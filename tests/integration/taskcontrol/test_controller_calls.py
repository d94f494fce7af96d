"""Controllers are called over real sockets: hostile, slow, huge and impersonating servers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from control_plane.api.jobs import ControllerRef
from control_plane.identity.authority import (
    CertificateAuthority,
    CertificateSubject,
    OwnIdentity,
    open_authority,
)
from control_plane.task_control import caller
from control_plane.task_control.caller import ControllerCaller
from control_plane.task_control.core.addresses import address_rules
from taskcontrol import server
from taskcontrol.api import TaskControlRequest, TaskControlResponse
from wire import tls
from wire.errors import Forbidden, InvalidInput, ProtocolError, TwineError, Unreachable

REQUEST = TaskControlRequest(job_handle="db", sequence_number=1, tasks=1, at=0.0)
LOOPBACK = address_rules(["127.0.0.0/8", "::1/128"], [])
Stream = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return open_authority(tmp_path / "authority.pem", "test")


def a_caller(
    authority: CertificateAuthority, rules=LOOPBACK, timeout_s: float = 60.0
) -> ControllerCaller:
    identity = OwnIdentity(authority, ["127.0.0.1"])
    return ControllerCaller(identity.agents_context(), rules, timeout_s)


@asynccontextmanager
async def answering(
    authority: CertificateAuthority, handle: Stream, subject: CertificateSubject | None = None
) -> AsyncIterator[ControllerRef]:
    """Serve raw bytes over TLS as the controller `db`, or under another name."""
    subject = subject or CertificateSubject("controller", "db", ("127.0.0.1", "localhost"))
    context = tls.server_context(authority.credential(subject, ""), require_client=True)
    async with await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context) as served:
        port = served.sockets[0].getsockname()[1]
        yield ControllerRef(url=f"https://127.0.0.1:{port}", name="db")


def saying(answer: bytes, *, again: bytes = b"", times: int = 0) -> Stream:
    """Return a server that reads a request and sends this answer, whatever the request was."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            for _ in range(times):
                writer.write(again)
                await writer.drain()
            await writer.drain()
            writer.close()
        except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
            pass

    return handle


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(head).encode() + body


@pytest.mark.behaviour("F-55")
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        http(b""),
        http(b"null"),
        http(b"{"),
        http(b'{"ack": 7}'),
        http(b'{"ack": [7]}'),
        http(b'{"ack": ["\xff"]}'),
        http(b'{"ack": [], "x": ' + b"[" * 300_000 + b"]" * 300_000 + b"}"),
        http(b'{"ack": []}', "Content-Encoding: gzip")[:-4],
        http(b"x" * 100, "Content-Encoding: gzip"),
        http(b'{"ack": []}', status="500 Broken"),
        http(b"", "Location: https://127.0.0.1/", status="307 Elsewhere"),
        http(b"", "X: " + "y" * 100_000),
    ],
)
def test_an_invalid_answer_is_an_error_only(answer: bytes, authority: CertificateAuthority):
    """The answers are garbage, nonsense, redirects or endlessly nested."""

    async def main() -> None:
        async with answering(authority, saying(answer)) as ref:
            with pytest.raises(TwineError):
                await a_caller(authority)(ref, REQUEST)

    asyncio.run(main())


@pytest.mark.behaviour("F-55")
def test_an_answer_without_end_is_cut_off(authority: CertificateAuthority):
    """Of a reply of a gigabyte, at most the maximum length of an answer is read."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1073741824\r\n\r\n" + b" " * (3 << 20)

    async def main() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                await reader.read()  # until the caller closes the connection
            except (ConnectionError, ssl.SSLError):
                pass
            finally:
                writer.transport.abort()

        async with answering(authority, handle) as ref:
            with pytest.raises(ProtocolError, match="more than 1MiB"):
                await a_caller(authority)(ref, REQUEST)

    asyncio.run(main())


@pytest.mark.behaviour("F-55", "TC16")
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
def test_a_controller_that_hangs_delays_a_caller_by_its_timeout_only(
    answer: bytes, authority: CertificateAuthority
):

    async def main() -> None:
        ended = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                await reader.read()
            except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError):
                pass
            finally:
                ended.set()
                writer.close()

        async with answering(authority, handle) as ref:
            with pytest.raises(Unreachable):
                await a_caller(authority, timeout_s=0.5)(ref, REQUEST)
            await ended.wait()

    asyncio.run(main())


@pytest.mark.behaviour("F-82")
@pytest.mark.parametrize(
    "subject",
    [
        CertificateSubject("controller", "other", ("127.0.0.1",)),
        CertificateSubject("host", "db", ("127.0.0.1",)),
        CertificateSubject("component", "control-plane", ("127.0.0.1",)),
    ],
)
def test_no_other_server_gets_a_byte_of_a_request(
    subject: CertificateSubject, authority: CertificateAuthority
):
    """A server at an internal address sees only a handshake that is aborted."""
    got: list[bytes] = []

    async def main() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                got.append(await reader.read())
            except (ConnectionError, ssl.SSLError):
                pass
            finally:
                writer.close()

        async with answering(authority, handle, subject) as ref:
            with pytest.raises(Unreachable, match="expected to reach /controller/db"):
                await a_caller(authority)(ref, REQUEST)

    asyncio.run(main())
    assert b"".join(got) == b""


@pytest.mark.behaviour("F-82")
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "127.1"]
)
def test_no_way_of_writing_an_inner_address_leads_there(host: str, authority: CertificateAuthority):
    """Names, numbers and mapped addresses are judged by the address that they resolve to."""
    connected = asyncio.Event()

    async def main() -> None:
        async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set()
            writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as served:
            port = served.sockets[0].getsockname()[1]
            ref = ControllerRef(url=f"https://{host}:{port}", name="db")
            with pytest.raises(Forbidden, match=r"loopback|is not an address"):
                await a_caller(authority, address_rules([], []))(ref, REQUEST)

    asyncio.run(main())
    assert not connected.is_set()


@pytest.mark.behaviour("F-82")
def test_a_name_that_leads_elsewhere_the_second_time_is_judged_again(
    authority: CertificateAuthority, monkeypatch: pytest.MonkeyPatch
):
    """DNS rebinding: the connection uses exactly the addresses that were judged."""
    answers = ["203.0.113.9", "127.0.0.1"]
    hosts_resolved: list[str] = []

    class Rebinding:
        async def resolve(self, host: str, port: int = 0, family: int = 0):
            hosts_resolved.append(host)
            address = answers[min(len(hosts_resolved), 2) - 1]
            return [
                {
                    "hostname": host,
                    "host": address,
                    "port": port,
                    "family": family,
                    "proto": 0,
                    "flags": 0,
                }
            ]

        async def close(self) -> None:
            pass

    monkeypatch.setattr(caller, "ThreadedResolver", Rebinding)

    async def main() -> None:
        resolver = caller._CheckingResolver(address_rules([], []))
        found = await resolver.resolve("db.example", 443)
        assert [address["host"] for address in found] == ["203.0.113.9"]
        with pytest.raises(Forbidden, match=r"db.example \(127.0.0.1\)"):
            await resolver.resolve("db.example", 443)

    asyncio.run(main())


@pytest.mark.behaviour("TC1")
def test_the_ready_server_answers_the_real_caller(authority: CertificateAuthority, tmp_path: Path):
    """The server is called by its name, as in most jobs."""
    subject = CertificateSubject("controller", "db", ("localhost",))
    tls.save(authority.credential(subject, ""), tmp_path / "c.json")

    def process(request: TaskControlRequest) -> TaskControlResponse:
        if request.job_handle == "web":
            raise InvalidInput("not mine")
        return TaskControlResponse(ack=["db-0.1"])

    async def main() -> None:
        async with server.serving(process, tmp_path / "c.json", "127.0.0.1", 0) as port:
            ref = ControllerRef(url=f"https://localhost:{port}", name="db")
            call = a_caller(authority)
            assert (await call(ref, REQUEST)).ack == ["db-0.1"]
            with pytest.raises(InvalidInput):
                await call(
                    ref,
                    TaskControlRequest(job_handle="web", sequence_number=2, tasks=1, at=0.0),
                )

    asyncio.run(main())
