"""The cluster's certificate authority, and the control plane's own identity issued by it.

Root keys are in one file (0600); `rotation` replaces roots. Leaf certificates can be revoked
(`people.py`); each request and each call checks that. The identity of a leaf is the URI of its
subject alternative name (`wire.peers`). Of a certificate request only the public key is used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from control_plane.identity.core.certificates import (
    SKEW_S,
    certificate_builder,
    common_name,
    key_pem,
    key_usage,
    root_name,
)
from control_plane.identity.core.roots import Roots, new_root, parse_roots, roots_file
from control_plane.identity.own_credential import HeldCredential
from wire import durable
from wire.certificates import ends_at
from wire.errors import ConfigError, InvalidInput
from wire.peers import peer_of, principal
from wire.tls import Credential

log = logging.getLogger(__name__)

Clock = Callable[[], float]
Disconnect = Callable[[str], Awaitable[None]]
"""Closes the connections to a machine's agent."""

LEAF_LIFE_S = 45 * 86_400.0
"""Of hosts: after a month without a control plane no host has to join again (docs/adr/0037)."""
OWN_LIFE_S = 86_400.0
TASK_LIFE_S = 86_400.0
"""Of tasks. It is short because their peers check no revocations (docs/adr/0105)."""
WARN_S = 7 * 86_400.0
"""Hosts renew each day, so a certificate with a week left was not renewed for a month."""
MAX_REQUEST_CHARS = 16_384
RENEW_FROM, RENEW_TO = 0.5, 0.66
_CHECK_S = 60.0
_USER = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")


@dataclass(frozen=True, slots=True)
class CertificateSubject:
    """The subject of a certificate."""

    role: str
    """`host`, `component` or `user`."""
    name: str
    hosts: tuple[str, ...] = ()
    """Addresses and DNS names it may serve at; none: it can only be a client."""

    @property
    def path(self) -> str:
        """What follows the trust domain in its identity."""
        return f"{self.role}/{self.name}"

    @property
    def common_name(self) -> str:
        """A display name; it decides nothing."""
        return f"{self.role} {self.name}"[:64]

    @property
    def serves(self) -> bool:
        """Return whether it may be a server, too."""
        return bool(self.hosts)


@dataclass(frozen=True, slots=True)
class TaskSubject:
    """The task that a certificate is for.

    Its identity has another form than that of users, hosts and components, so that no server
    mistakes a task for one of them (`wire.peers`).
    """

    entitlement: str
    job: str
    task: str
    hosts: tuple[str, ...] = ()
    """Empty: a task's callers check its identity, and no address."""
    serves: bool = True

    @property
    def path(self) -> str:
        """What follows the trust domain in its identity."""
        return f"entitlement/{self.entitlement}/job/{self.job}/task/{self.task}"

    @property
    def common_name(self) -> str:
        """A display name; it decides nothing."""
        return f"task {self.task}"[:64]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate that was issued."""

    pem: str
    not_after: float


class CertificateAuthority:
    """Issues certificates; the only holder of the root key."""

    def __init__(
        self,
        roots: Roots,
        cluster: str,
        *,
        leaf_life_s: float = LEAF_LIFE_S,
        task_leaf_life_s: float = TASK_LIFE_S,
        clock: Clock = time.time,
    ) -> None:
        """Use existing roots; `open_authority` finds or makes them."""
        self.roots = roots
        self.leaf_life_s, self.task_leaf_life_s = leaf_life_s, task_leaf_life_s
        self._clock = clock
        self.cluster = cluster

    @property
    def ca_pem(self) -> str:
        """Return the certificates of all roots that are trusted; the first one issues."""
        return self.roots.bundle()

    @property
    def ca_hash(self) -> str:
        """Return the pin of hosts: `sha256:<hex>` over the issuing certificate (DER)."""
        return self.roots.active.ca_hash

    def issue(
        self,
        public_key: ec.EllipticCurvePublicKey,
        subject: CertificateSubject | TaskSubject,
        life_s: float | None = None,
    ) -> Leaf:
        """Return a certificate that binds a key to a subject."""
        now = self._clock()
        root = self.roots.active
        not_after = min(now + (life_s or self.leaf_life_s), root.ends_at)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if subject.serves:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        root_key = root.certificate.public_key()
        assert isinstance(root_key, ec.EllipticCurvePublicKey)
        assert root.key is not None
        name = common_name(subject.common_name)
        builder = (
            certificate_builder(name, root.certificate.subject, now - SKEW_S, not_after)
            .public_key(public_key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.SubjectAlternativeName(self._subject_names(subject)), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key), critical=False
            )
        )
        leaf = builder.sign(root.key, hashes.SHA256())
        pem = leaf.public_bytes(serialization.Encoding.PEM).decode()
        fields = {"subject": subject.common_name, "serial": leaf.serial_number}
        log.info("certificate issued", extra=fields)
        return Leaf(pem + root.pem, leaf.not_valid_after_utc.timestamp())

    def credential(
        self, subject: CertificateSubject, url: str, life_s: float | None = None
    ) -> Credential:
        """Return a new key and its certificate, for the control plane or for a user."""
        key = ec.generate_private_key(ec.SECP256R1())
        leaf = self.issue(key.public_key(), subject, life_s)
        return Credential(
            name=subject.name,
            url=url,
            key_pem=key_pem(key).decode(),
            certificate_pem=leaf.pem,
            ca_pem=self.ca_pem,
            issued_at=self._clock(),
            not_after=leaf.not_after,
            cluster=self.cluster,
        )

    def identity_of(self, subject: CertificateSubject | TaskSubject) -> str:
        """Return the URI in a certificate that identifies its holder."""
        return f"spiffe://{self.cluster}/{subject.path}"

    def _subject_names(self, subject: CertificateSubject | TaskSubject) -> list[x509.GeneralName]:
        uri = self.identity_of(subject)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
        for host in dict.fromkeys(subject.hosts):
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                names.append(x509.DNSName(host))
        return names


def open_authority(
    path: Path,
    cluster: str,
    *,
    leaf_life_s: float = LEAF_LIFE_S,
    task_leaf_life_s: float = TASK_LIFE_S,
    clock: Clock = time.time,
) -> CertificateAuthority:
    """Return the authority of a file, after creating it if there is none.

    Losing the file means that every host joins again; a damaged one is never replaced.
    """
    if not path.exists():
        durable.write(path, roots_file(Roots(new_root(cluster, clock()))))
        log.info("certificate authority created", extra={"cluster": cluster})
    try:
        roots = parse_roots(path.read_bytes())
        path.chmod(0o600)
    except LookupError as e:
        raise ConfigError(f"key and certificate in {path} do not match") from e
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as e:
        raise ConfigError(
            f"cannot use the authority in {path}: {_unusable_reason(e)}",
            hint="restore the file from a backup; if there is no backup: twine-control-plane "
            "new-authority, then let each host join again (docs/security.md)",
        ) from e
    if any(root.certificate.subject != root_name(cluster) for root in roots.trusted()):
        raise ConfigError(
            f"the authority in {path} belongs to another cluster, not to {cluster!r}",
            hint=(
                "set `cluster` to the name with which it was created, or use another state folder"
            ),
        )
    lives = {"leaf_life_s": leaf_life_s, "task_leaf_life_s": task_leaf_life_s}
    return CertificateAuthority(roots, cluster, **lives, clock=clock)


def _unusable_reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or "it cannot be read"
    return "it holds no elliptic-curve key and certificate in PEM form, or they are damaged"


def check_user_name(name: str) -> None:
    """Raise `InvalidInput` unless a certificate can carry this name of a user."""
    if not _USER.fullmatch(name):
        raise InvalidInput(
            f"{name!r} is not a valid name of a user: a-z, 0-9, dot, - and _, up to 63"
        )


def is_dns_name(host: str) -> bool:
    """Return whether a certificate can carry a text as a DNS name."""
    return len(host) <= 253 and _HOST.fullmatch(host) is not None


def check_host(host: str) -> None:
    """Raise `InvalidInput` unless a certificate can carry this address or DNS name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if not is_dns_name(host):
            raise InvalidInput(
                f"{host!r} is neither an address nor a DNS name", hint="without a port"
            ) from None


def public_key_of(csr_pem: str) -> ec.EllipticCurvePublicKey:
    """Return the public key of a certificate request, or raise if the sender does not hold the key.

    P-256 and P-384 are accepted (the curves that every TLS library has); all else in the request,
    names and extensions included, is ignored.
    """
    if len(csr_pem) > MAX_REQUEST_CHARS:
        raise InvalidInput(f"the certificate request has more than {MAX_REQUEST_CHARS} characters")
    try:
        request = x509.load_pem_x509_csr(csr_pem.encode())
        key = request.public_key()
        valid = request.is_signature_valid
    except (ValueError, UnicodeError, UnsupportedAlgorithm, x509.InvalidVersion) as e:
        raise InvalidInput("this is not a certificate request in PEM form (PKCS #10)") from e
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in (
        ec.SECP256R1.name,
        ec.SECP384R1.name,
    ):
        raise InvalidInput("the certificate request must be for a P-256 or P-384 key")
    if not valid:
        raise InvalidInput("the certificate request is not signed with its own key")
    return key


class OwnIdentity(HeldCredential):
    """The control plane's leaf: serves the front end and calls the agents."""

    def __init__(
        self, authority: CertificateAuthority, hosts: Sequence[str], clock: Clock = time.time
    ):
        """Issue the first certificate, valid at these addresses and names."""
        self._authority = authority
        self._subject = CertificateSubject("component", "control-plane", tuple(hosts))
        self._clock = clock
        self._life_s = min(OWN_LIFE_S, authority.leaf_life_s)
        super().__init__(authority.credential(self._subject, "", self._life_s))
        self.ends: dict[str, float] = {}
        """Machine → end of the certificate that its agent last showed."""

    def ending(self) -> list[str]:
        """Return the machines whose certificates end within a week: they cannot renew."""
        soon = self._clock() + WARN_S
        return sorted(machine for machine, ends in self.ends.items() if ends < soon)

    def _check_agent(self, certificate: Mapping[str, Any]) -> None:
        """Refuse an agent whose identity was revoked, and log a certificate that ends soon."""
        super()._check_agent(certificate)
        machine, ends = principal(peer_of(certificate)), ends_at(certificate)
        if ends < self._clock() + WARN_S and self.ends.get(machine) != ends:
            fields = {"machine": machine, "ends_in_s": round(ends - self._clock())}
            log.warning("the certificate of a host ends soon and is not renewed", extra=fields)
        self.ends[machine] = ends

    @property
    def not_after(self) -> float:
        """Return the end of the present certificate, in seconds since 1970."""
        return self._held.not_after

    def renew(self) -> None:
        """Replace key and certificate in every context; open connections stay."""
        self._replace(self._authority.credential(self._subject, "", self._life_s))
        log.info("own certificate renewed", extra={"not_after": self._held.not_after})

    async def renew_forever(self) -> None:
        """Renew at a random moment between half and two thirds of each life, forever."""
        while True:
            held = self._held
            share = random.uniform(RENEW_FROM, RENEW_TO)
            due = held.issued_at + (held.not_after - held.issued_at) * share
            left_s = due - self._clock()
            while left_s > 0:
                await asyncio.sleep(min(left_s, _CHECK_S))
                left_s = due - self._clock()
            self.renew()

    async def end_connections_forever(
        self, disconnect: Disconnect, check_s: float = _CHECK_S
    ) -> None:
        """End connections to agents whose certificates have expired.

        Our own agents close such connections; a program that uses a host's key does not.
        """
        while True:
            await asyncio.sleep(check_s)
            now = self._clock()
            for machine in [name for name, ends in self.ends.items() if ends <= now]:
                await disconnect(machine)
