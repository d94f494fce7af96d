"""Answers to DNS questions in wire format, made with dnspython's own messages."""

from __future__ import annotations

import asyncio
import random
import socket

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from control_plane.api.endpoints import Endpoint, Endpoints
from resolver import dns_server
from resolver.dns_message import MAX_ANSWERS, UDP_PAYLOAD, Zone
from resolver.dns_server import DnsServer
from resolver.zone import subject
from wire.errors import Busy

ZONE = Zone(dns.name.from_text("twine.internal"), 1)


def an_endpoint(index: int, host: str, job: str = "web", **ports: int) -> Endpoint:
    ports = ports or {"http": 20_000 + index}
    return Endpoint(task=f"{job}-{index}", machine=f"m{index}", host=host, ports=ports, version=1)


WEB = [
    an_endpoint(0, "192.0.2.1"),
    an_endpoint(1, "192.0.2.1"),
    an_endpoint(2, "2001:db8::1"),
    an_endpoint(3, "m3.example"),
]


def a_server(**jobs: list[Endpoint]) -> DnsServer:
    async def find(job: str, wait_s: float) -> Endpoints | None:
        if job == "unknown":
            raise Busy("no answer yet")
        listed = jobs.get(job)
        return None if listed is None else Endpoints(job=job, revision=1, endpoints=listed)

    return DnsServer(ZONE, find, random.Random(0))


SERVER = a_server(web=WEB, empty=[])


def ask(name: str, kind: str = "A", server: DnsServer = SERVER, tcp: bool = False, **options):
    query = dns.message.make_query(name, kind, **options)
    wire = asyncio.run(server.reply_to(query.to_wire(), tcp=tcp))
    assert wire is not None
    reply = dns.message.from_wire(wire)
    assert query.is_response(reply)
    return reply


def data(section) -> list[str]:
    return sorted(f"{dns.rdatatype.to_text(s.rdtype)} {r}" for s in section for r in s)


@pytest.mark.behaviour("SD3")
@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("web.twine.internal", "A", ["A 192.0.2.1"]),
        ("WEB.Twine.Internal", "AAAA", ["AAAA 2001:db8::1"]),
        ("web-1.web.twine.internal", "A", ["A 192.0.2.1"]),
        ("web-2.web.twine.internal", "AAAA", ["AAAA 2001:db8::1"]),
        ("web-3.web.twine.internal", "A", ["CNAME m3.example."]),
        (
            "_http._tcp.web.twine.internal",
            "SRV",
            [f"SRV 0 1 {20_000 + i} web-{i}.web.twine.internal." for i in range(4)],
        ),
    ],
)
def test_names_of_the_zone(name: str, kind: str, expected: list[str]):
    """The names are those of a job, of one of its tasks, and of one of its ports."""
    reply = ask(name, kind)
    assert reply.rcode() == dns.rcode.NOERROR
    assert reply.flags & dns.flags.AA
    assert data(reply.answer) == expected
    assert all(s.ttl == ZONE.ttl_s for s in reply.answer)


def test_a_service_includes_its_addresses():
    reply = ask("_http._tcp.web.twine.internal", "SRV")
    assert data(reply.additional) == ["A 192.0.2.1", "A 192.0.2.1", "AAAA 2001:db8::1"]


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        ("nothing.twine.internal", "A", dns.rcode.NXDOMAIN),
        ("web-9.web.twine.internal", "A", dns.rcode.NXDOMAIN),
        ("_grpc._tcp.web.twine.internal", "SRV", dns.rcode.NXDOMAIN),
        ("_http._sctp.web.twine.internal", "SRV", dns.rcode.NXDOMAIN),
        ("a.b.c.d.web.twine.internal", "A", dns.rcode.NXDOMAIN),
        (r"\000\255.twine.internal", "A", dns.rcode.NXDOMAIN),
        ("empty.twine.internal", "A", dns.rcode.NOERROR),
        ("_http._tcp.empty.twine.internal", "SRV", dns.rcode.NOERROR),
        ("web.twine.internal", "MX", dns.rcode.NOERROR),
        ("twine.internal", "A", dns.rcode.NOERROR),
    ],
)
def test_no_such_name_is_not_no_such_record(name: str, kind: str, code: int):
    """RFC 2308: both answers name the zone's SOA, so clients cache them no longer than others."""
    reply = ask(name, kind)
    assert reply.rcode() == code
    assert not reply.answer
    [soa] = [r for s in reply.authority for r in s]
    assert soa.minimum == ZONE.ttl_s


@pytest.mark.behaviour("JC10")
def test_srv_records_have_differing_weights_and_omit_tasks_without_requests():
    """A resolver that follows RFC 2782 gives a canary its share of the requests."""
    few, none, *others = WEB
    server = a_server(web=[replace(few, weight=7), replace(none, weight=0), *others])
    records = data(ask("_http._tcp.web.twine.internal", "SRV", server).answer)
    assert [record.split()[2] for record in records] == ["100", "100", "7"]
    assert "web-1" not in "".join(records)
    assert data(ask("web-1.web.twine.internal", "A", server).answer) == ["A 192.0.2.1"]
    alone = a_server(web=[replace(none, weight=0), WEB[2]])
    assert data(ask("web.twine.internal", "A", alone).answer) == []
    assert data(ask("web.twine.internal", "AAAA", alone).answer) == ["AAAA 2001:db8::1"]


@pytest.mark.behaviour("BUG-AG62")
@pytest.mark.parametrize("name", ["_dmarc", "a_b", "-x", "x-", "j" * 57, r"\000"])
def test_a_name_that_no_job_can_have_is_not_looked_up(name: str):
    """The front end refuses a request with such a name, also for all other jobs in it."""
    for asked in (name, f"{name}-1.{name}", f"_http._tcp.{name}"):
        assert subject(dns.name.from_text(asked, None).to_text().split(".")) is None
    assert ask(f"{name}.twine.internal").rcode() == dns.rcode.NXDOMAIN


@pytest.mark.behaviour("BUG-AG64")
@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example", "foo bar", "fe80::1%eth0"])
def test_an_impossible_host_harms_no_other_task_and_is_answered(host: str):
    server = a_server(web=[an_endpoint(0, host), an_endpoint(1, "2001:db8::1")])
    assert data(ask("web.twine.internal", "AAAA", server).answer) == ["AAAA 2001:db8::1"]
    assert len(data(ask("_http._tcp.web.twine.internal", "SRV", server).answer)) == 2
    assert ask("web-0.web.twine.internal", "MX", server).rcode() in (
        dns.rcode.SERVFAIL,
        dns.rcode.NOERROR,
    )


def test_an_unknown_job_is_answered_with_an_error_not_as_missing():
    """A client that received "no such name" would give up on a job that runs."""
    assert ask("unknown.twine.internal").rcode() == dns.rcode.SERVFAIL


def test_other_names_are_refused():
    assert ask("example.com").rcode() == dns.rcode.REFUSED
    assert ask("version.bind", "TXT", rdclass="CH").rcode() == dns.rcode.REFUSED


def test_the_zone_itself():
    assert data(ask("twine.internal", "SOA").answer)
    assert data(ask("twine.internal", "NS").answer) == ["NS ns.twine.internal."]


def test_a_long_answer_is_truncated_over_udp_and_whole_over_tcp():
    server = a_server(web=[an_endpoint(i, f"10.0.{i // 250}.{i % 250 + 1}") for i in range(900)])
    name = "web.twine.internal"
    for options, room in ({}, 512), ({"use_edns": 0, "payload": 4096}, UDP_PAYLOAD):
        reply = ask(name, server=server, **options)
        assert reply.flags & dns.flags.TC
        assert not reply.answer
        assert len(reply.to_wire()) <= room
    assert len(data(ask(name, server=server, tcp=True).answer)) == 900


def test_of_a_huge_job_each_answer_has_other_tasks():
    server = a_server(web=[an_endpoint(i, f"10.{i >> 8}.{i & 255}.1") for i in range(15_000)])
    first, second = (data(ask("web.twine.internal", server=server, tcp=True).answer) for _ in "ab")
    assert len(first) == len(second) == MAX_ANSWERS
    assert first != second
    services = ask("_http._tcp.web.twine.internal", "SRV", server=server, tcp=True)
    assert len(data(services.answer)) == MAX_ANSWERS


def framed(name: str) -> bytes:
    wire = dns.message.make_query(name, "A").to_wire()
    return len(wire).to_bytes(2, "big") + wire


@pytest.mark.behaviour("BUG-AG120")
async def test_the_dns_server_ends_at_once_and_closes_open_connections():
    """Since Python 3.12 it waited for its clients, which may keep a connection as they like."""
    async with asyncio.timeout(60):
        async with a_server(web=WEB).listening("127.0.0.1", 0) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(framed("web.twine.internal"))
            await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
        await reader.read()
        writer.close()


@pytest.mark.behaviour("BUG-AG120")
async def test_a_client_that_reads_no_answers_is_disconnected(monkeypatch: pytest.MonkeyPatch):
    """Its connection stayed open for good, and did not count among the 200."""
    monkeypatch.setattr(dns_server, "IDLE_S", 0.2)
    server = a_server()

    async def long_reply(_wire: bytes, *, tcp: bool) -> bytes:
        return bytes(60_000)

    monkeypatch.setattr(server, "reply_to", long_reply)
    async with asyncio.timeout(60), server.listening("127.0.0.1", 0) as port:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.connect(("127.0.0.1", port))
        _, writer = await asyncio.open_connection(sock=small, limit=1)
        writer.write(framed("web.twine.internal") * 250)
        while len(asyncio.all_tasks()) == 1:
            await asyncio.sleep(0.01)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)
        writer.close()


@given(st.binary(max_size=600))
def test_random_bytes_never_crash_the_dns_server(wire: bytes):
    """Bytes that are no question get an error or no answer. An answer is never answered."""
    reply = asyncio.run(SERVER.reply_to(wire, tcp=False))
    if reply is not None:
        assert not wire[2] & 0x80
        assert reply[:2] == wire[:2]
        assert len(reply) <= UDP_PAYLOAD


@given(st.integers(0, 400), st.data())
def test_a_damaged_dns_question_never_crashes_the_server(at: int, more: st.DataObject):
    wire = bytearray(dns.message.make_query("_http._tcp.web.twine.internal", "SRV").to_wire())
    wire[at % len(wire)] = more.draw(st.integers(0, 255))
    asyncio.run(SERVER.reply_to(bytes(wire), tcp=False))
