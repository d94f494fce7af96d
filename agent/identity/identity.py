"""The host's side of joining: its key, its certificate, and their renewal.

The host sends no secret before the control plane has proved that its authority has the operator's
pin (docs/adr/0012-one-small-authority-one-time-tokens-a-mandatory-pin.md). The key never leaves
the host.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from agent import api
from agent.api.joining import JoinRequest, RenewRequest
from agent.api.presence import Presence, PresenceAnswer
from agent.api.task_identity import TaskCertificate, TaskIdentityRequest
from agent.routes import JOIN_ROUTES
from wire import durable, pins, tls
from wire.client import WireClient
from wire.errors import ConfigError, Forbidden, InvalidInput, ProtocolError, TwineError
from wire.tls import Credential

log = logging.getLogger(__name__)

LAST_TERM, LAST_OWNERS = "last-term", "last-owners"
"""Files in the identity's folder: the last control plane's term, and owners (`fencing`)."""
LOCATION = Path("/etc/twine/location.toml")
"""File with the location of the machine, for host profiles (`sidekick facts`)."""
RENEW_FROM, RENEW_TO = 0.5, 0.66
"""Share of a certificate's life after which the next one is fetched. It is random, so that hosts
that joined together do not renew together."""
RENEW_EVERY_S = 86_400.0
_RETRY_S = 30.0
_CLOCK_CHECK_S = 60.0
"""Time after which a changed clock or a suspend of the host is noticed."""

_ROUTE = {r.name: r for r in JOIN_ROUTES}
_PIN = re.compile(api.DIGEST_PATTERN)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of this host."""

    machine: str
    control_plane_url: str
    not_after: float
    """End of the certificate, seconds since 1970."""
    recorded: CandidateIdentity | None = field(default=None, compare=False)
    """The host as the control plane has recorded it; only after a join."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """The output of `twinectl token create` for one host."""

    url: str
    """`https://host:port` of the control plane."""
    token: str
    ca_hash: str
    """`sha256:<hex>` over the authority's certificate; there is no trust on first use."""


@dataclass(frozen=True, slots=True)
class CandidateIdentity:
    """The requested name, address and location of the host."""

    machine: str
    address: str
    """`host:port` at which the control plane reaches the agent; its certificate is for this."""
    facts: api.MachineFacts
    location: api.Location
    machine_type: str = "small"


def write_location(candidate: CandidateIdentity, path: Path = LOCATION) -> None:
    """Write the machine's location for host profiles, readable by all. Raises `HostError`."""
    names = {**msgspec.structs.asdict(candidate.location), "machine_type": candidate.machine_type}
    lines = ["# Written by twine-agent join; profiles read it as location.* and machine.type.\n"]
    lines += [f'{name} = "{value}"\n' for name, value in names.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write(path, "".join(lines).encode(), mode=0o644)


class HostIdentity:
    """The identity of this host, in one file of a folder that only root can read."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / "identity.json"
        self._clone_file = folder / "second-host"
        self._last_senders = folder / LAST_TERM, folder / LAST_OWNERS
        self.boot_id = ""
        self._clock = clock
        self._domain: str | None = None
        self._contexts = tls.RenewedContexts()
        self._renewing = asyncio.Lock()

    def find(self) -> Identity | None:
        """Return this host's identity, None before it joined; `ConfigError` if unreadable."""
        if not self._path.exists():
            return None
        held = tls.load(self._path)
        return Identity(held.name, held.url, held.not_after)

    async def join(self, invitation: Invitation, candidate: CandidateIdentity) -> Identity:
        """Become a machine of the region; a host that has joined before becomes another machine.

        The token is sent only after the authority's certificate matches the pin, and only over a
        connection that this authority certifies.
        """
        if not invitation.url.startswith("https://"):
            raise InvalidInput(f"cannot join {invitation.url!r}: not an https:// address")
        ca_pem = await self._fetch_authority(invitation)
        from agent.identity import keys

        key_pem = keys.new_key()
        request = JoinRequest(
            token=invitation.token,
            machine=candidate.machine,
            csr_pem=keys.signing_request(key_pem, candidate.machine),
            address=candidate.address,
            location=candidate.location,
            machine_type=candidate.machine_type,
            facts=candidate.facts,
        )
        context = tls.pinned_context(ca_pem, tls.CONTROL_PLANE)
        async with WireClient(invitation.url, context) as client:
            answer = await client.call(_ROUTE["join"], request)
        held = Credential(
            name=candidate.machine,
            url=invitation.url,
            key_pem=key_pem,
            certificate_pem=answer.certificate_pem,
            ca_pem=answer.ca_pem or ca_pem,
            issued_at=self._clock(),
            not_after=answer.not_after,
            cluster=answer.cluster,
        )
        self._save(held)
        self.store_clone_reason("")
        for path in self._last_senders:  # accept the new control plane independent of earlier ones
            path.unlink(missing_ok=True)
        log.info("joined", extra={"machine": held.name, "url": held.url})
        recorded = replace(
            candidate,
            location=answer.location or candidate.location,
            machine_type=answer.machine_type or candidate.machine_type,
        )
        return Identity(held.name, held.url, held.not_after, recorded)

    def domain(self) -> str:
        """Return the trust domain of this host; empty before it joined, or with an old file."""
        if self._domain is None and self._path.exists():
            self._domain = tls.load(self._path).cluster
        return self._domain or ""

    def server_context(self) -> ssl.SSLContext:
        """Return the context of the agent's TCP port; it follows every renewal."""
        return self._contexts.add(
            lambda held: tls.server_context(held, require_client=True), self._credential()
        )

    def client_context(self) -> ssl.SSLContext:
        """Return the context to call the control plane with; it follows every renewal."""
        return self._contexts.add(
            lambda held: tls.client_context(held, tls.CONTROL_PLANE), self._credential()
        )

    async def renew(self) -> Identity:
        """Fetch the next certificate for a new key, using the present certificate.

        The answer also has the authorities to trust from now on (BUG-AG5). If they changed, one
        more renewal confirms to the control plane that they are in use.
        """
        async with self._renewing:
            known = self._credential().ca_pem
            identity = await self._renew_once()
            return identity if self._credential().ca_pem == known else await self._renew_once()

    async def renew_when_asked(self) -> None:
        """Renew now, because the authority will change; log a failure, the caller asks again."""
        try:
            await self.renew()
        except TwineError as e:
            log.warning("cannot renew the certificate as requested", extra={"reason": str(e)})

    async def _renew_once(self) -> Identity:
        held = self._credential()
        from agent.identity import keys

        key_pem = keys.new_key()
        context = tls.client_context(held, tls.CONTROL_PLANE)
        async with WireClient(held.url, context) as client:
            request = RenewRequest(
                csr_pem=keys.signing_request(key_pem, held.name),
                trusts=pins.ca_hashes(held.ca_pem),
                boot_id=self.boot_id,
            )
            answer = await client.call(_ROUTE["renew"], request)
        fresh = msgspec.structs.replace(
            held,
            key_pem=key_pem,
            certificate_pem=answer.certificate_pem,
            ca_pem=answer.ca_pem or held.ca_pem,
            issued_at=self._clock(),
            not_after=answer.not_after,
            cluster=answer.cluster or held.cluster,
        )
        self._save(fresh)
        self._contexts.renew(fresh)
        log.info("renewed", extra={"machine": fresh.name, "not_after": fresh.not_after})
        return Identity(fresh.name, fresh.url, fresh.not_after)

    def trusted(self) -> str:
        """Return the authorities that this host trusts now, as PEM."""
        return self._credential().ca_pem

    def has_joined(self) -> bool:
        """Return whether this host has an identity."""
        return self._path.exists()

    def read_clone_reason(self) -> str:
        """Return the stored reason why this host is a clone; empty: it is not."""
        try:
            return self._clone_file.read_text(errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as e:
            raise ConfigError(f"cannot read {self._clone_file}: {e.strerror}") from e

    def store_clone_reason(self, why: str) -> None:
        """Store why this host is a clone; an empty reason removes the file."""
        if why:
            durable.write(self._clone_file, why.encode())
        else:
            self._clone_file.unlink(missing_ok=True)

    async def show_presence(self, presence: Presence) -> PresenceAnswer:
        """Ask the control plane whether this host is a clone."""
        held = self._credential()
        async with WireClient(held.url, self.client_context()) as client:
            answer = await client.call(_ROUTE["show_presence"], presence)
        assert isinstance(answer, PresenceAnswer)
        return answer

    async def certify_task(self, task_id: str, csr_pem: str) -> TaskCertificate:
        """Return a certificate for a task's key, only for a task of this host."""
        held = self._credential()
        async with WireClient(held.url, self.client_context()) as client:
            request = TaskIdentityRequest(csr_pem=csr_pem)
            answer = await client.call(_ROUTE["certify_task"], request, task=task_id)
        assert isinstance(answer, TaskCertificate)
        return answer

    async def renew_forever(self) -> None:
        """Renew the certificate in time until cancelled; repeat after a failure."""
        share = random.uniform(RENEW_FROM, RENEW_TO)
        while True:
            try:
                held = self._credential()
                await self._wait_until(renewal_time(held.issued_at, held.not_after, share))
                await self.renew()
            except TwineError as e:
                log.warning("cannot renew the certificate yet", extra={"reason": str(e)})
                await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.5))

    async def _wait_until(self, when: float) -> None:
        left_s = when - self._clock()
        while left_s > 0:
            await asyncio.sleep(min(left_s, _CLOCK_CHECK_S))
            left_s = when - self._clock()

    async def _fetch_authority(self, invitation: Invitation) -> str:
        """Return the certificate that has the pin, without other certificates."""
        if not _PIN.fullmatch(invitation.ca_hash):
            raise InvalidInput(
                f"{invitation.ca_hash!r} is not a pin of the form sha256:<64 hex digits>",
                hint="`twinectl token create` prints it as ca_hash",
            )
        async with WireClient(invitation.url, tls.unverified_context()) as client:
            answer = await client.call(_ROUTE["get_authority"])
        ca_hash = pins.ca_hash(answer.ca_pem)
        if not hmac.compare_digest(ca_hash, invitation.ca_hash):
            raise Forbidden(
                f"the authority of {invitation.url} is {ca_hash}, not "
                f"{invitation.ca_hash}: the token was not sent",
                hint="compare the pin with `twinectl token create`; if it is right, another "
                "server answers between this host and the control plane",
            )
        return pins.first_certificate(answer.ca_pem)

    def _credential(self) -> Credential:
        if not self._path.exists():
            raise ConfigError(
                "this host has not joined a control plane",
                hint="twine-agent join URL --token … --ca-hash … (from `twinectl token create`)",
            )
        return tls.load(self._path)

    def _save(self, credential: Credential) -> None:
        """Check that a credential works, then replace the old one."""
        try:
            tls.server_context(credential, require_client=True)
        except ConfigError as e:
            raise ProtocolError(f"the control plane's certificate cannot be used: {e}") from e
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.parent.chmod(0o700)
        tls.save(credential, self._path)
        self._domain = None


def renewal_time(issued_at: float, not_after: float, share: float) -> float:
    """Return when to renew a certificate: after a share of its life, or of a day if shorter.

    The rest of its life covers an outage of the control plane (docs/adr/0037).
    """
    return issued_at + min(not_after - issued_at, RENEW_EVERY_S) * share
