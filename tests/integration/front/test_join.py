"""Joining over real TLS: what a host sends to which server, and which hosts are admitted (F-78 to
F-80).
"""

from __future__ import annotations

import asyncio
import datetime
import ssl
import threading
import time
from pathlib import Path

import msgspec
import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ec

from agent import api
from agent.api.joining import Authority, Certificate, RenewRequest
from agent.identity.identity import CandidateIdentity, HostIdentity, Invitation
from agent.routes import JOIN_ROUTES
from control_plane.api.inventory import InventoryMachine
from control_plane.api.machines import EventKind, Hardware, Token, TokenRequest
from control_plane.identity.authority import (
    SKEW_S,
    CertificateAuthority,
    CertificateSubject,
    open_authority,
)
from control_plane.identity.core.certificates import key_pem
from wire import tls
from wire.client import WireClient
from wire.errors import ConfigError, Forbidden, InvalidInput, TwineError, Unreachable
from wire.peers import peer_of
from wire.tls import Credential

from .conftest import FACTS, Region

pytestmark = pytest.mark.behaviour("F-78", "F-80")

ROUTE = {r.name: r for r in JOIN_ROUTES}


def candidate(machine: str = "vm1", address: str = "127.0.0.1:7443") -> CandidateIdentity:
    return CandidateIdentity(machine, address, FACTS, api.Location(msb="msb2"), "small")


def invitation(region: Region, machine: str = "vm1") -> Invitation:
    token: Token = region.run(region.registrar.create_token(TokenRequest(machine=machine)))
    return Invitation(region.url, token.token, token.ca_hash)


async def renewed(region: Region, context: ssl.SSLContext) -> Certificate:
    """Call a route that only a host may call."""
    async with WireClient(region.url, context, timeout_s=5) as client:
        return await client.call(ROUTE["renew"], RenewRequest(csr_pem="none"))  # type: ignore[no-any-return]


def test_a_host_joins_and_is_recorded_with_its_place(region: Region, tmp_path: Path) -> None:
    host = HostIdentity(tmp_path / "identity")
    assert host.find() is None

    joined = asyncio.run(host.join(invitation(region), candidate()))

    assert host.find() == joined
    assert joined.machine == "vm1"
    assert joined.control_plane_url == region.url
    record = region.control_plane.brokers.table.get("vm1")
    assert (record.address, record.location.msb) == ("127.0.0.1:7443", "msb2")
    assert (tmp_path / "identity").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "identity/identity.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.behaviour("BUG-AG107")
def test_a_host_learns_the_place_and_type_that_the_inventory_has(
    region: Region, tmp_path: Path
) -> None:
    """Host profiles used the options of `twine-agent join`, which the inventory overrides."""
    place = api.Location(datacenter="dc2", msb="msb9", rack="rack7")
    listed = InventoryMachine(
        machine="vm1",
        location=place,
        machine_type="skylake",
        hardware=Hardware(cpus=4, memory_bytes=8 << 30),
    )
    region.run(region.control_plane.brokers.import_machines([listed]))
    joined = asyncio.run(HostIdentity(tmp_path).join(invitation(region), candidate()))

    assert joined.recorded
    assert (joined.recorded.location, joined.recorded.machine_type) == (place, "skylake")


def test_the_control_plane_reaches_the_host_that_joined_and_no_other(
    region: Region, tmp_path: Path
) -> None:
    host = HostIdentity(tmp_path / "identity")
    asyncio.run(host.join(invitation(region), candidate()))

    async def call(expected: str, server_name: str = "127.0.0.1") -> str:
        seen: list[str] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ssl_object = writer.get_extra_info("ssl_object")
            seen.append(peer_of(ssl_object.getpeercert()).name)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=host.server_context())
        async with server:
            port = server.sockets[0].getsockname()[1]
            context = region.identity.agents_context()
            tls.EXPECTED_SERVER.set(f"/host/{expected}" if expected else "")
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname=server_name
            )
            await reader.read()
            writer.close()
            await writer.wait_closed()
        return seen[0]

    assert asyncio.run(call("vm1")) == "spiffe://twine/component/control-plane"
    with pytest.raises(ssl.SSLCertVerificationError, match="/host/vm1 answered"):
        asyncio.run(call("vm2"))
    with pytest.raises(ssl.SSLCertVerificationError, match="/host/vm1 answered"):
        asyncio.run(call(""))  # a caller that names no machine connects to none
    with pytest.raises(ssl.SSLCertVerificationError, match=r"doesn't match|not valid for"):
        asyncio.run(call("vm1", "127.0.0.2"))


def test_a_token_can_be_used_once(region: Region, tmp_path: Path) -> None:
    invited = invitation(region)
    asyncio.run(HostIdentity(tmp_path / "a").join(invited, candidate()))
    with pytest.raises(Forbidden, match="used already"):
        asyncio.run(HostIdentity(tmp_path / "b").join(invited, candidate()))
    assert not (tmp_path / "b").exists()


def test_two_hosts_racing_with_one_token_get_one_certificate(
    region: Region, tmp_path: Path
) -> None:
    invited = invitation(region)

    async def race() -> list[object]:
        hosts = [HostIdentity(tmp_path / str(i)) for i in range(4)]
        joins = [h.join(invited, candidate()) for h in hosts]
        return await asyncio.gather(*joins, return_exceptions=True)

    results = asyncio.run(race())
    assert sum(isinstance(r, Forbidden) for r in results) == 3


def test_a_token_is_bound_to_its_host(region: Region, tmp_path: Path) -> None:
    with pytest.raises(Forbidden, match="it is for another host"):
        asyncio.run(HostIdentity(tmp_path).join(invitation(region, "vm2"), candidate("vm1")))
    assert len(region.control_plane.brokers.table) == 0


def test_wrong_tokens_are_delayed(region: Region, tmp_path: Path) -> None:
    good = invitation(region)
    bad = Invitation(region.url, "twn1." + "a" * 8 + "." + "b" * 32, good.ca_hash)
    host = HostIdentity(tmp_path)
    for _ in range(5):
        with pytest.raises(Forbidden, match="did not issue it"):
            asyncio.run(host.join(bad, candidate()))
    with pytest.raises(TwineError, match=r"5 joins from 127\.0\.0\.1 were refused") as refusal:
        asyncio.run(host.join(good, candidate()))
    assert refusal.value.exit_code == 75
    assert "try again in" in refusal.value.hint


class Listener:
    """A TLS server of an attacker; it keeps every byte that it receives."""

    def __init__(self, authority: CertificateAuthority, answer_ca: str) -> None:
        self.received = b""
        self._authority, self._answer_ca = authority, answer_ca
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self.loop = asyncio.new_event_loop()

    def __enter__(self) -> Listener:
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        assert self._ready.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)
        self.loop.close()

    async def _run(self) -> None:
        subject = CertificateSubject("component", "control-plane", ("127.0.0.1",))
        held = self._authority.credential(subject, "")
        context = tls.server_context(held, require_client=False)
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, ssl=context)
        self.url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            self._ready.set()
            await self._stop.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received += await reader.readuntil(b"\r\n\r\n")
        body = msgspec.json.encode(Authority(ca_pem=self._answer_ca))
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        self.received += await reader.read()
        writer.close()


def test_nothing_secret_is_sent_to_an_authority_with_another_pin(
    region: Region, tmp_path: Path
) -> None:
    other = open_authority(tmp_path / "other.pem", "twine")
    good = invitation(region)
    with Listener(other, other.ca_pem) as listener:
        invited = Invitation(listener.url, good.token, good.ca_hash)
        with pytest.raises(Forbidden, match="the token was not sent"):
            asyncio.run(HostIdentity(tmp_path / "id").join(invited, candidate()))
    assert listener.received.startswith(b"GET /v1/authority ")
    assert listener.received.count(b"HTTP/1.1") == 1
    assert good.token.encode() not in listener.received


def test_no_secret_is_sent_to_a_caller_with_only_the_right_authority(
    region: Region, tmp_path: Path
) -> None:
    """A man in the middle forwards the true certificate, also with its own one behind it."""
    other = open_authority(tmp_path / "other.pem", "twine")
    good = invitation(region)
    with Listener(other, region.authority.ca_pem + other.ca_pem) as listener:
        invited = Invitation(listener.url, good.token, good.ca_hash)
        with pytest.raises(
            Unreachable, match="its certificate is not issued by a trusted authority"
        ):
            asyncio.run(HostIdentity(tmp_path / "id").join(invited, candidate()))
    assert good.token.encode() not in listener.received


def test_a_host_cannot_pose_as_the_control_plane(region: Region, tmp_path: Path) -> None:
    subject = CertificateSubject("host", "control-plane", ("127.0.0.1",))
    held = region.authority.credential(subject, "")
    host = HostIdentity(tmp_path / "id")
    asyncio.run(host.join(invitation(region), candidate()))

    async def call() -> None:
        context = tls.server_context(held, require_client=False)
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await asyncio.open_connection("127.0.0.1", port, ssl=host.client_context())

    with pytest.raises(ssl.SSLCertVerificationError, match="/host/control-plane answered"):
        asyncio.run(call())


@pytest.mark.parametrize("pin", ["", "sha256:abc", "md5:" + "a" * 64, "SHA256:" + "A" * 64])
def test_a_pin_is_mandatory_and_complete(region: Region, tmp_path: Path, pin: str) -> None:
    invited = Invitation(region.url, "twn1.x", pin)
    with pytest.raises(InvalidInput, match="not a pin"):
        asyncio.run(HostIdentity(tmp_path).join(invited, candidate()))


def test_plain_http_is_refused(tmp_path: Path) -> None:
    invited = Invitation("http://127.0.0.1:1", "t", "sha256:" + "a" * 64)
    with pytest.raises(InvalidInput, match="not an https"):
        asyncio.run(HostIdentity(tmp_path).join(invited, candidate()))


def test_a_host_renews_for_its_own_name_and_contexts_follow(region: Region, tmp_path: Path) -> None:
    host = HostIdentity(tmp_path)
    before = asyncio.run(host.join(invitation(region), candidate()))
    context, serving = host.client_context(), host.server_context()
    old_serial = tls.load(tmp_path / "identity.json").certificate_pem

    async def renew_and_call() -> None:
        await host.renew()
        assert await _serial(serving, region) != _serial_of(old_serial)
        async with WireClient(region.url, context) as client:
            with pytest.raises(InvalidInput):  # authorised; refused for its content
                await client.call(ROUTE["renew"], RenewRequest(csr_pem="x"))

    asyncio.run(renew_and_call())
    after = host.find()
    assert after is not None
    assert after.machine == before.machine


async def _serial(serving: ssl.SSLContext, region: Region) -> str:
    """Return the serial number of the certificate that a context serves now."""
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0, ssl=serving)
    async with server:
        port = server.sockets[0].getsockname()[1]
        context = region.identity.agents_context()
        tls.EXPECTED_SERVER.set("/host/vm1")
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        serial: str = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        await writer.wait_closed()
    return serial


def _serial_of(pem: str) -> str:
    from cryptography import x509

    return f"{x509.load_pem_x509_certificate(pem.encode()).serial_number:X}".zfill(2)


def test_a_removed_machine_cannot_renew(region: Region, tmp_path: Path) -> None:
    host = HostIdentity(tmp_path)
    asyncio.run(host.join(invitation(region), candidate()))
    planned = region.control_plane.inventory.outages.plan_unavailability
    region.run(planned(["vm1"], EventKind.DECOMMISSION, "sold"))
    region.run(region.control_plane.brokers.remove("vm1"))
    with pytest.raises(Forbidden, match="no longer part of the region"):
        asyncio.run(host.renew())


def test_a_host_that_has_not_joined_reports_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has not joined"):
        HostIdentity(tmp_path).server_context()


def test_the_control_planes_own_renewal_is_served_at_once(region: Region) -> None:
    async def seen() -> str:
        port = int(region.url.rpartition(":")[2])
        context = tls.pinned_context(region.authority.ca_pem, tls.CONTROL_PLANE)
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        serial: str = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        await writer.wait_closed()
        return serial

    async def renew() -> None:
        region.identity.renew()

    before = asyncio.run(seen())
    region.run(renew())
    assert asyncio.run(seen()) != before


# The six bad certificates of F-78: the case without one is in test_roles.


def _foreign() -> Credential:
    ca = trustme.CA()
    leaf = ca.issue_cert("spiffe.example")
    return Credential(
        name="x",
        url="",
        key_pem=leaf.private_key_pem.bytes().decode(),
        certificate_pem=leaf.cert_chain_pems[0].bytes().decode(),
        ca_pem="",
        issued_at=0,
        not_after=0,
    )


def _at(region: Region, folder: Path, now: float) -> Credential:
    authority = open_authority(region.folder / "authority.pem", "twine", clock=lambda: now)
    return authority.credential(CertificateSubject("host", "vm1"), "", 60.0)


def _forged(region: Region, folder: Path) -> Credential:
    """Return a forgery with the same names and another key, by an attacker without the root key."""
    return open_authority(folder / "forged.pem", "twine").credential(
        CertificateSubject("host", "vm1"), ""
    )


def _context(region: Region, held: Credential) -> ssl.SSLContext:
    held = msgspec.structs.replace(held, ca_pem=region.authority.ca_pem)
    return tls.client_context(held, tls.CONTROL_PLANE)


@pytest.mark.parametrize("kind", ["foreign", "forged", "expired", "not yet valid"])
def test_a_bad_certificate_ends_the_handshake(shared: Region, tmp_path: Path, kind: str) -> None:
    now = time.time()
    held = {
        "foreign": _foreign,
        "forged": lambda: _forged(shared, tmp_path),
        "expired": lambda: _at(shared, tmp_path, now - 120),
        "not yet valid": lambda: _at(shared, tmp_path, now + SKEW_S + 120),
    }[kind]()
    with pytest.raises(Unreachable):
        asyncio.run(renewed(shared, _context(shared, held)))


def test_the_right_authority_with_the_wrong_role_is_refused(shared: Region) -> None:
    held = shared.authority.credential(CertificateSubject("user", "vm1"), "")
    with pytest.raises(Forbidden, match="may not call"):
        asyncio.run(renewed(shared, _context(shared, held)))


def test_a_certificate_without_an_identity_of_ours_is_refused(shared: Region) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    leaf = shared.authority.issue(key.public_key(), CertificateSubject("robot", "vm1"))
    held = shared.authority.credential(CertificateSubject("host", "vm1"), "")
    held = msgspec.structs.replace(held, key_pem=key_pem(key).decode(), certificate_pem=leaf.pem)
    with pytest.raises(TwineError, match="no identity of Twine") as refusal:
        asyncio.run(renewed(shared, _context(shared, held)))
    assert refusal.value.status == 401


def test_the_time_constants_of_these_tests_are_correct(shared: Region, tmp_path: Path) -> None:
    from cryptography import x509

    held = _at(shared, tmp_path, time.time() - 120)
    ends = x509.load_pem_x509_certificate(held.certificate_pem.encode()).not_valid_after_utc
    assert ends < datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
