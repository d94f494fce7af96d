"""Tokens and the authority without a network: time, storage, keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st
from inventory import some_facts

from agent.api.joining import JoinRequest
from control_plane.api.machines import MachineRecord, MachineView, TokenRequest
from control_plane.identity.authority import (
    LEAF_LIFE_S,
    CertificateAuthority,
    CertificateSubject,
    OwnIdentity,
    open_authority,
    public_key_of,
)
from control_plane.identity.registrar import (
    TOKENS,
    JoinFailures,
    Registrar,
    check_certificate_host,
    host_of,
)
from control_plane.runtime.runtime import Runtime
from control_plane.store.memory import MemoryStore
from wire.errors import Busy, ConfigError, Forbidden, InvalidInput, Unauthenticated
from wire.peers import expect_peer, peer_of, principal

FACTS = some_facts("vm1")


class Inventory:
    def __init__(self) -> None:
        self.records: dict[str, MachineRecord] = {}

    async def joined(self, request: JoinRequest) -> MachineRecord:
        record = MachineRecord(
            machine=request.machine,
            location=request.location,
            machine_type="small",
            address=request.address,
            facts=request.facts,
        )
        self.records[request.machine] = record
        return record

    async def get_machine(self, name: str) -> MachineView:
        return MachineView(record=self.records[name])


class Setup:
    """A registrar whose clock the test sets."""

    def __init__(self, folder: Path) -> None:
        self.now = 1_700_000_000.0
        self.store, self.inventory = MemoryStore(), Inventory()
        self.authority = open_authority(folder / "a.pem", "twine", clock=lambda: self.now)
        self.registrar = Registrar(
            self.store, self.authority, self.inventory, "https://cp:7440", Runtime(lambda: self.now)
        )

    async def token(self, machine: str = "vm1", ttl_s: float = 600.0) -> str:
        request = TokenRequest(machine=machine, ttl_s=ttl_s)
        return (await self.registrar.create_token(request)).token

    async def join(self, token: str, machine: str = "vm1", csr: str = "") -> x509.Certificate:
        request = JoinRequest(
            token=token,
            machine=machine,
            csr_pem=csr or a_request(),
            address="10.77.0.11:7443",
            facts=FACTS,
        )
        answer = await self.registrar.join(request, "10.77.0.11")
        return x509.load_pem_x509_certificate(answer.certificate_pem.encode())


def a_request(
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None, name: str = "vm1"
) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    )
    requested_name = x509.UniformResourceIdentifier("spiffe://twine/component/control-plane")
    builder = builder.add_extension(x509.SubjectAlternativeName([requested_name]), critical=False)
    signed = builder.sign(key or ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


@pytest.fixture
def service(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_only_a_hash_of_the_secret_is_stored(service: Setup) -> None:
    async def scenario() -> None:
        async with service.store:
            secret = (await service.token()).rpartition(".")[2]
            stored = (await service.store.list_prefix(TOKENS)).entries[0]
            assert len(secret) == 32
            assert secret.encode() not in stored.value
            assert secret not in stored.key

    asyncio.run(scenario())


def test_an_expired_token_is_reported_only_to_its_holder(service: Setup) -> None:
    async def scenario() -> None:
        async with service.store:
            token = await service.token(ttl_s=600)
            service.now += 600
            with pytest.raises(Forbidden, match="has expired"):
                await service.join(token)
            with pytest.raises(Forbidden, match="did not issue it"):
                await service.join(token[:-1] + ("a" if token[-1] != "a" else "b"))

    asyncio.run(scenario())


def test_a_token_is_burned_even_if_recording_the_machine_fails(service: Setup) -> None:
    async def scenario() -> None:
        async with service.store:
            token = await service.token()

            async def fails(request: JoinRequest) -> MachineRecord:
                raise Busy("the store is full")

            joined = service.inventory.joined
            service.inventory.joined = fails
            with pytest.raises(Busy):
                await service.join(token)
            service.inventory.joined = joined  # type: ignore[method-assign]
            with pytest.raises(Forbidden, match="used already"):
                await service.join(token)

    asyncio.run(scenario())


def test_a_bad_request_for_a_certificate_does_not_cost_the_token(service: Setup) -> None:
    async def scenario() -> None:
        async with service.store:
            token = await service.token()
            with pytest.raises(InvalidInput):
                await service.join(token, csr="nonsense")
            await service.join(token)

    asyncio.run(scenario())


@pytest.mark.behaviour("BUG-HT7")
def test_a_join_request_is_read_only_with_a_valid_token(service: Setup) -> None:
    """Formerly the certificate request was read before the token. So a caller without a token could
    send any request, as often as it liked."""
    wrong = "twn1.aaaaaaaa." + "a" * 32

    async def scenario() -> None:
        async with service.store:
            for _ in range(5):
                with pytest.raises(Forbidden, match="did not issue it"):
                    await service.join(wrong, csr="nonsense")
            with pytest.raises(Busy):
                await service.join(wrong, csr="nonsense")

    asyncio.run(scenario())


@pytest.mark.behaviour("BUG-HT10")
def test_a_token_costs_the_same_however_many_are_stored(
    service: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly all of them were read for each new one."""
    read = list[str]()
    really = service.store.list_prefix

    async def counted(prefix: str, *args: object, **options: object) -> object:
        read.append(prefix)
        return await really(prefix, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(service.store, "list_prefix", counted)

    async def scenario() -> None:
        async with service.store:
            for _ in range(50):
                await service.token()

    asyncio.run(scenario())
    assert read == [TOKENS]


def test_the_authority_decides_the_contents_of_a_certificate(service: Setup) -> None:
    async def scenario() -> x509.Certificate:
        async with service.store:
            return await service.join(await service.token(), csr=a_request(name="root"))

    leaf = asyncio.run(scenario())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://twine/host/vm1"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.77.0.11"]
    assert leaf.not_valid_after_utc.timestamp() == service.now + LEAF_LIFE_S
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_machine_that_is_known_joins_again_with_a_new_token(service: Setup) -> None:
    async def scenario() -> None:
        async with service.store:
            await service.join(await service.token())
            await service.join(await service.token())

    asyncio.run(scenario())


def test_old_tokens_are_forgotten(service: Setup) -> None:
    async def scenario() -> None:
        async with service.store:
            await service.token()
            service.now += 2 * 86_400
            await service.token()
            assert len((await service.store.list_prefix(TOKENS)).entries) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("token", ["", "twn1", "twn1.aaaaaaaa", "twn2." + "a" * 41, "x" * 9999])
def test_a_malformed_token_is_refused_like_a_wrong_one(service: Setup, token: str) -> None:
    async def scenario() -> None:
        async with service.store:
            with pytest.raises(Forbidden, match="did not issue it"):
                await service.join(token)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("machine", "ttl_s"), [("VM 1", 60), ("", 60), ("vm1", 0), ("vm1", -1), ("vm1", 1e9)]
)
def test_a_request_for_a_token_is_checked(service: Setup, machine: str, ttl_s: float) -> None:
    with pytest.raises(InvalidInput):
        asyncio.run(service.token(machine, ttl_s))


class TwoClocks(Runtime):
    """A runtime whose clocks a test sets."""

    def __init__(self) -> None:
        self.date_s = self.passed_s = 0.0
        super().__init__(wall=lambda: self.date_s)

    def now(self) -> float:
        return self.passed_s


def test_failures_are_forgiven_after_a_minute_and_counted_per_address() -> None:
    runtime = TwoClocks()
    failures = JoinFailures(runtime)
    for _ in range(5):
        failures.check("10.0.0.1")
        failures.add("10.0.0.1")
    with pytest.raises(Busy):
        failures.check("10.0.0.1")
    with pytest.raises(Busy):
        failures.check("::ffff:10.0.0.1")
    failures.check("10.0.0.2")
    runtime.passed_s = 61.0
    failures.check("10.0.0.1")


@pytest.mark.behaviour("BUG-UX177")
def test_failures_are_forgiven_although_the_wall_clock_was_set_back() -> None:
    """Formerly an address had to wait until the wall clock was again where it had been."""
    runtime = TwoClocks()
    failures, runtime.date_s = JoinFailures(runtime), 86_400.0
    for _ in range(5):
        failures.add("10.0.0.1")
    runtime.date_s, runtime.passed_s = 0.0, 61.0
    failures.check("10.0.0.1")


def test_one_ipv6_host_cannot_use_all_its_addresses() -> None:
    failures = JoinFailures(TwoClocks())
    for i in range(5):
        failures.add(f"2001:db8::{i}")
    with pytest.raises(Busy):
        failures.check("2001:db8::99")
    failures.check("2001:db8:0:1::99")


@pytest.mark.parametrize(
    "make",
    [
        lambda: "",
        lambda: "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----",
        lambda: "x" * 20_000,
        lambda: a_request(rsa.generate_private_key(65_537, 2048)),
        lambda: a_request(ec.generate_private_key(ec.SECP192R1())),
        lambda: a_request()[:200] + a_request()[200:],
        lambda: "\ud800",
    ],
)
def test_only_p256_and_p384_requests_are_taken(make: Callable[[], str]) -> None:
    with pytest.raises(InvalidInput):
        public_key_of(make())


@given(st.text(max_size=60))
def test_an_address_is_taken_or_refused(text: str) -> None:
    try:
        assert host_of(text)
    except InvalidInput:
        return


@pytest.mark.behaviour("BUG-HT10")
@pytest.mark.parametrize(
    "address",
    [
        "１０.0.0.1:7443",
        "10.0.0.1:７443",
        f"{'a' * 100}.lab:7443",
        f"{'a.' * 130}lab:7443",
        "-a.lab:7443",
        "a..lab:7443",
        "10.0.0.1:0",
        "10.0.0.1:65536",
    ],
)
def test_an_address_that_no_resolver_takes_is_refused(address: str) -> None:
    """Formerly full-width digits and labels of 100 letters were accepted."""
    with pytest.raises(InvalidInput):
        host_of(address)


@pytest.mark.parametrize(
    ("address", "host"),
    [("10.0.0.1:7443", "10.0.0.1"), ("[FD00::1]:1", "fd00::1"), ("VM1.Lab:7443", "vm1.lab")],
)
def test_the_host_of_an_address_is_what_the_certificate_names(address: str, host: str) -> None:
    assert host_of(address) == host


# The authority


def test_an_authority_is_made_once_and_then_read(tmp_path: Path) -> None:
    path = tmp_path / "state" / "a.pem"
    first = open_authority(path, "twine")
    assert open_authority(path, "twine").ca_hash == first.ca_hash
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_authority_of_another_cluster_is_not_used(tmp_path: Path) -> None:
    open_authority(tmp_path / "a.pem", "one")
    with pytest.raises(ConfigError, match="another cluster"):
        open_authority(tmp_path / "a.pem", "two")


def test_a_damaged_authority_is_refused_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.pem"
    open_authority(path, "twine")
    whole = path.read_bytes()
    other = open_authority(tmp_path / "b.pem", "twine").ca_pem.encode()
    key_end = whole.index(b"-----BEGIN CERTIFICATE")
    for damaged in (b"", whole[:100], whole[:key_end], whole[:key_end] + other):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError):
            open_authority(path, "twine")
        assert path.read_bytes() == damaged


def test_no_leaf_outlives_its_root(tmp_path: Path) -> None:
    now = 1_700_000_000.0
    open_authority(tmp_path / "a.pem", "twine", clock=lambda: now)
    late = now + 10 * 365 * 86_400 - 3600
    authority: CertificateAuthority = open_authority(
        tmp_path / "a.pem", "twine", clock=lambda: late
    )
    assert authority.credential(CertificateSubject("user", "u"), "").not_after == late + 3600


def test_the_control_plane_renews_between_half_and_two_thirds_of_a_life(tmp_path: Path) -> None:
    now = 1_700_000_000.0
    sleeps: list[float] = []
    authority = open_authority(tmp_path / "a.pem", "twine", clock=lambda: now)
    own = OwnIdentity(authority, ["127.0.0.1"], lambda: now)
    first = own.not_after

    async def scenario() -> None:
        nonlocal now
        loop = asyncio.get_running_loop()
        task = loop.create_task(own.renew_forever())
        real_sleep = asyncio.sleep

        async def sleep(delay: float) -> None:
            nonlocal now
            now += delay
            sleeps.append(delay)
            await real_sleep(0)

        asyncio.sleep = sleep  # type: ignore[assignment]
        try:
            while own.not_after == first:
                await real_sleep(0)
        finally:
            asyncio.sleep = real_sleep
            task.cancel()

    asyncio.run(scenario())
    assert 0.5 * 86_400 <= sum(sleeps) <= 0.67 * 86_400


# Peers


@pytest.mark.parametrize(
    "names",
    [
        (),
        (("DNS", "spiffe://twine/host/vm1"),),
        (("URI", "https://twine/host/vm1"),),
        (("URI", "spiffe://twine/host/vm1"), ("URI", "spiffe://twine/user/root")),
        (("URI", "spiffe://twine/host/vm1/extra"),),
        (("URI", "spiffe://twine/robot/vm1"),),
        (("URI", "spiffe://twine/host/"),),
        (("URI", "spiffe://twine/host/vm1\n"),),
    ],
)
def test_only_one_uri_of_ours_is_an_identity(names: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(Unauthenticated):
        peer_of({"subjectAltName": names, "subject": ((("commonName", "root"),),)})


def test_an_identity_has_a_role_and_a_name() -> None:
    certificate = {"subjectAltName": (("DNS", "x"), ("URI", "spiffe://twine/host/vm1"))}
    peer = peer_of(certificate)
    assert (peer.role, principal(peer)) == ("host", "vm1")
    expect_peer(certificate, "/host/vm1")
    with pytest.raises(Forbidden):
        expect_peer(certificate, "/host/vm")


def test_a_credential_does_not_print_its_key(tmp_path: Path) -> None:
    held = open_authority(tmp_path / "a.pem", "twine").credential(
        CertificateSubject("user", "u"), ""
    )
    assert "PRIVATE" not in repr(held)
    assert b"PRIVATE" in msgspec.json.encode(held)


OWN = ["cp.example", "10.77.0.1", "localhost", "127.0.0.1", "::1"]


@pytest.mark.behaviour("BUG-HT27")
@pytest.mark.parametrize(
    ("host", "source", "may"),
    [
        ("10.77.0.11", "10.77.0.11", True),
        ("10.77.0.11", "192.168.3.4", True),
        ("vm1.example", "10.77.0.11", True),
        ("cp.example", "10.77.0.11", False),
        ("10.77.0.1", "10.77.0.11", False),
        ("10.77.0.1", "10.77.0.1", True),
        ("localhost", "10.77.0.11", False),
        ("127.0.0.2", "10.77.0.11", False),
        ("169.254.1.1", "10.77.0.11", False),
        ("0.0.0.0", "10.77.0.11", False),
        ("ff02::1", "fd00::2", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("cp.example", "", True),
    ],
)
def test_a_certificate_names_no_host_of_others(host: str, source: str, *, may: bool) -> None:
    """Refused are the control plane's own names, and addresses such as loopback that reach no other
    host."""
    if may:
        check_certificate_host(host, source, OWN)
    else:
        with pytest.raises(Forbidden, match=f"cannot have a certificate for {host}"):
            check_certificate_host(host, source, OWN)
