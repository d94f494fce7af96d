"""How hosts become machines of the region: one-time tokens, joining, renewal.

A token is made for one host name and one use. It is marked as used, by compare-and-set in the
store, before the certificate is issued. So two requests with one token can never both succeed, and
a crash in between costs a token, never a second certificate.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
from base64 import b32encode
from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Protocol

import msgspec

from agent.api import ID_PATTERN
from agent.api.joining import Certificate, JoinRequest, RenewRequest
from agent.api.task_identity import TaskCertificate
from control_plane.api.machines import MachineRecord, MachineView, Token, TokenRequest
from control_plane.identity.authority import (
    CertificateAuthority,
    CertificateSubject,
    Leaf,
    TaskSubject,
    is_dns_name,
    public_key_of,
)
from control_plane.identity.duplicates import DuplicateHosts
from control_plane.identity.rotation import Rotation
from control_plane.identity.stored import decode_if_intact, delete_all
from control_plane.runtime.runtime import Runtime
from control_plane.store import Entry, Put, Store
from wire.errors import Busy, Conflict, FieldError, Forbidden, InvalidInput, NotFound
from wire.networks import network_of

log = logging.getLogger(__name__)

TOKENS = "join-tokens/"
TTL_MIN_S, TTL_MAX_S = 1.0, 7 * 86_400.0
MAX_FAILURES = 5
WINDOW_S = 60.0
_MAX_NETWORKS = 10_000
_CLEANUP_S = 600.0
_KEEP_EXPIRED_S = 86_400.0
"""Used and expired tokens stay this long, so that the error of a replay can name the cause."""

_TOKEN = re.compile(r"twn1\.(?P<id>[a-z2-7]{8})\.(?P<secret>[a-z2-7]{32})")
_NAME = re.compile(ID_PATTERN)
_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")


class JoinInventory(Protocol):
    """The calls of the registrar to the resource broker."""

    async def joined(self, request: JoinRequest) -> MachineRecord:
        """Record a host whose identity was proved; a known one may join again."""

    async def get_machine(self, name: str) -> MachineView:
        """Return a machine, or raise `NotFound`."""


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A join token as it is stored; it has a hash of the secret, so a reader cannot join by it."""

    schema: int = 1
    secret_sha256: str
    machine: str
    expires_at: float
    used_at: float | None = None


class Registrar:
    """Makes join tokens, and turns a valid one into a machine with a certificate."""

    def __init__(
        self,
        store: Store,
        authority: CertificateAuthority,
        inventory: JoinInventory,
        url: str,
        runtime: Runtime,
        own_hosts: Collection[str] = (),
    ) -> None:
        """`url` is the address of the control plane for hosts; it is printed with each token.

        `own_hosts`: all names and addresses of the control plane, which no host may have.
        """
        self._own_hosts = frozenset(own_hosts)
        self._store = store
        self._authority = authority
        self._inventory = inventory
        self._url = url
        self.rotation = Rotation(store, authority, runtime)
        self.duplicates = DuplicateHosts(store, runtime)
        self._runtime = runtime
        self._failures = JoinFailures(runtime)
        self._cleaned_at = float("-inf")

    @property
    def ca_pem(self) -> str:
        """Return the authority's certificates, which are no secret."""
        return self._authority.ca_pem

    async def create_token(self, request: TokenRequest) -> Token:
        """Return a new token for one host; its secret is stored nowhere."""
        _check_token_request(request)
        await self._forget_old_tokens()
        token_id, secret = _random_letters(5), _random_letters(20)
        record = TokenRecord(
            secret_sha256=_hash_secret(secret),
            machine=request.machine,
            expires_at=self._runtime.wall() + request.ttl_s,
        )
        key = TOKENS + token_id
        await self._store.txn({key: 0}, [Put(key, msgspec.json.encode(record))])
        log.info("join token made", extra={"machine": request.machine, "token_id": token_id})
        return Token(
            token=f"twn1.{token_id}.{secret}",
            ca_hash=self._authority.ca_hash,
            url=self._url,
            machine=request.machine,
            expires_at=record.expires_at,
        )

    async def join(self, request: JoinRequest, address: str) -> Certificate:
        """Return the certificate of a host that shows a valid token, and record the machine.

        `address` is the source of the request; after five refused tokens in a minute it has to
        wait.
        """
        self._failures.check(address)
        try:
            entry, record = await self._find_token(request)
            hosts = (host_of(request.address),)
            check_certificate_host(hosts[0], address, self._own_hosts)
            public_key = public_key_of(request.csr_pem)
            await self._mark_used(entry, record)
        except Forbidden as e:
            self._failures.add(address)
            extra = {"machine": request.machine, "address": address, "reason": str(e)}
            log.warning("a host was refused to join", extra=extra)
            raise
        leaf = self._authority.issue(public_key, CertificateSubject("host", request.machine, hosts))
        machine = await self._inventory.joined(request)
        await self.rotation.record_trust(request.machine, [self._authority.ca_hash])
        await self.duplicates.joined(request.machine)
        log.info("host joined", extra={"machine": request.machine, "address": request.address})
        certificate = self._certificate(request.machine, leaf)
        return msgspec.structs.replace(
            certificate, location=machine.location, machine_type=machine.machine_type
        )

    async def renew(self, machine: str, request: RenewRequest) -> Certificate:
        """Return the next certificate of a machine that proved its identity."""
        public_key = public_key_of(request.csr_pem)
        if self.duplicates.is_clone(machine, request.boot_id):
            raise Forbidden(
                self.duplicates.problem(machine),
                hint="join it under another name: twinectl token create --host NAME",
            )
        try:
            view = await self._inventory.get_machine(machine)
        except NotFound as e:
            raise Forbidden(
                f"machine {machine} is no longer part of the region",
                hint="to restore it, join it with a new token",
            ) from e
        subject = CertificateSubject("host", machine, (host_of(view.record.address),))
        leaf = self._authority.issue(public_key, subject)
        await self.rotation.record_trust(machine, request.trusts)
        return self._certificate(machine, leaf)

    def certify_task(self, subject: TaskSubject, csr_pem: str) -> TaskCertificate:
        """Return the next certificate of a task, for the request's key only."""
        leaf = self._authority.issue(
            public_key_of(csr_pem), subject, self._authority.task_leaf_life_s
        )
        identity = self._authority.identity_of(subject)
        return TaskCertificate(
            identity=identity, certificate_pem=leaf.pem, not_after=leaf.not_after
        )

    def _certificate(self, machine: str, leaf: Leaf) -> Certificate:
        return Certificate(
            machine=machine,
            certificate_pem=leaf.pem,
            ca_pem=self._authority.ca_pem,
            not_after=leaf.not_after,
            cluster=self._authority.cluster,
        )

    async def _find_token(self, request: JoinRequest) -> tuple[Entry, TokenRecord]:
        """Return the token, or raise `Forbidden`; a caller without the secret learns nothing.

        The other checks are made only for callers that have it.
        """
        match = _TOKEN.fullmatch(request.token)
        token_id, secret = (match["id"], match["secret"]) if match else ("", "")
        entry = await self._store.get(TOKENS + token_id) if match else None
        record = (
            decode_if_intact(entry, TokenRecord) if entry else None
        )  # no host joins with damage
        wanted = record.secret_sha256 if record else _hash_secret("no such token")
        if not hmac.compare_digest(_hash_secret(secret), wanted) or entry is None or record is None:
            raise _token_refused("this control plane did not issue it")
        now = self._runtime.wall()
        if record.used_at is not None:
            raise _token_refused("it was used already")
        if now >= record.expires_at:
            raise _token_refused("it has expired")
        if not hmac.compare_digest(record.machine, request.machine):
            raise _token_refused(f"it is for another host than {request.machine}")
        return entry, record

    async def _mark_used(self, entry: Entry, record: TokenRecord) -> None:
        """Mark the token as used, or raise `Forbidden` if another request did."""
        used = msgspec.structs.replace(record, used_at=self._runtime.wall())
        try:
            await self._store.txn(
                {entry.key: entry.revision}, [Put(entry.key, msgspec.json.encode(used))]
            )
        except Conflict as e:
            raise _token_refused("it was used already") from e

    async def _forget_old_tokens(self) -> None:
        """Remove used and expired tokens, once in `_CLEANUP_S`: it reads all tokens."""
        now = self._runtime.wall()
        if abs(now - self._cleaned_at) < _CLEANUP_S:
            return
        self._cleaned_at = now
        listing = await self._store.list_prefix(TOKENS)
        old = [
            entry.key
            for entry in listing.entries
            if (token := decode_if_intact(entry, TokenRecord)) is None
            or token.expires_at + _KEEP_EXPIRED_S < now
        ]
        await delete_all(self._store, old)


class JoinFailures:
    """Slows down guessing: after some failures an address has to wait; a restart forgets them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._at: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str) -> None:
        """Raise `Busy` while the address has used up its failures."""
        times = self._at.get(network_of(address), deque())
        now = self._runtime.now()
        while times and times[0] <= now - WINDOW_S:
            times.popleft()
        if len(times) >= MAX_FAILURES:
            wait_s = int(times[0] + WINDOW_S - now) + 1
            raise Busy(
                f"{len(times)} joins from {address or 'here'} were refused within a minute",
                hint=f"try again in {wait_s} s, with a token from `twinectl token create`",
            )

    def add(self, address: str) -> None:
        """Count one failure."""
        network = network_of(address)
        self._at.setdefault(network, deque(maxlen=MAX_FAILURES)).append(self._runtime.now())
        self._at.move_to_end(network)
        while len(self._at) > _MAX_NETWORKS:
            self._at.popitem(last=False)


def host_of(address: str) -> str:
    """Return the host of `host:port`, or raise `InvalidInput` if a certificate cannot name it."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match["port"]) <= 65_535:
        raise InvalidInput(
            f"{address!r} is not an address of an agent",
            hint="for instance 10.77.0.11:7443 or [fd00::11]:7443 or vm1.example:7443",
        )
    host: str = (match["v6"] or match["host"]).lower()
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if match["v6"] or not is_dns_name(host):
            raise InvalidInput(f"{host!r} is neither an IP address nor a DNS name") from None
        return host


def check_certificate_host(host: str, source: str, own_hosts: Collection[str]) -> None:
    """Raise `Forbidden` if a certificate must not contain a host (BUG-HT27).

    Loopback, link-local and multicast addresses reach no remote host, and the control plane's names
    are its own. A caller from such an address may have it: an agent on the same host.
    """
    try:
        at, came_from = ipaddress.ip_address(host), ipaddress.ip_address(source or "::1")
    except ValueError:
        at, came_from = None, ipaddress.ip_address(source or "::1")
    if came_from.is_loopback or host == source:
        return
    if host in own_hosts:
        reason = "that is the address of the control plane"
    elif at is not None and (
        at.is_loopback or at.is_link_local or at.is_multicast or at.is_unspecified
    ):
        reason = "other hosts cannot reach a host there"
    else:
        return
    raise Forbidden(
        f"a host that joins from {source} cannot have a certificate for {host}: {reason}",
        hint="start its agent with a reachable address of the host",
    )


def _check_token_request(request: TokenRequest) -> None:
    errors = []
    if not _NAME.fullmatch(request.machine):
        errors.append(FieldError(field="machine", reason="not a host label: a-z, 0-9 and -"))
    if not TTL_MIN_S <= request.ttl_s <= TTL_MAX_S:
        reason = f"must be {TTL_MIN_S:.0f} to {TTL_MAX_S:.0f} seconds"
        errors.append(FieldError(field="ttl_s", reason=reason))
    if errors:
        raise InvalidInput("cannot make this join token", errors=tuple(errors))


def _token_refused(why: str) -> Forbidden:
    return Forbidden(
        f"the join token is refused: {why}",
        hint="make a new one: twinectl token create --host NAME",
    )


def _random_letters(count: int) -> str:
    """Return random bytes as base32, which is easy to copy by hand; 5 bytes are 8 letters."""
    return b32encode(secrets.token_bytes(count)).decode().lower()


def _hash_secret(secret: str) -> str:
    """Return the stored form; 160 random bits need neither salt nor stretching."""
    return hashlib.sha256(secret.encode()).hexdigest()
