"""The roots of the authority while one replaces another (docs/adr/0088).

A rotation has three steps. `prepare`: a new root is trusted, and issues nothing. `activate`: it
issues, and the one before is still trusted. `retire`: that one is no longer trusted. Each step
waits until every host and credential is ready for it; `lockouts` lists those that are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from control_plane.api.authority import HostTrust, Step
from control_plane.api.people import IssuedCredential
from control_plane.identity.core.certificates import (
    ROOT_LIFE_S,
    SKEW_S,
    certificate_builder,
    key_pem,
    key_usage,
    root_name,
)
from wire import pins
from wire.errors import Conflict, some_of

_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]{1,32})-----[^-]{1,8192}-----END \1-----\n?")
_NAMED = 3
"""Most hosts or users that an error names; the others are counted."""


@dataclass(frozen=True, slots=True)
class Root:
    """A root certificate, with its key while it issues or is about to issue."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | None

    @property
    def pem(self) -> str:
        """Return the certificate in PEM form."""
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def ca_hash(self) -> str:
        """Return its pin."""
        return pins.ca_hash(self.pem)

    @property
    def ends_at(self) -> float:
        """Return the end of its validity, in seconds since 1970."""
        return self.certificate.not_valid_after_utc.timestamp()


@dataclass(frozen=True, slots=True)
class Roots:
    """The root that issues, and the others that are trusted too."""

    active: Root
    coming: Root | None = None
    former: Root | None = None

    def trusted(self) -> list[Root]:
        """Return all roots; the one that issues is first."""
        return [root for root in (self.active, self.coming, self.former) if root is not None]

    def bundle(self) -> str:
        """Return the certificates of all roots, in PEM form; the one that issues is first."""
        return "".join(root.pem for root in self.trusted())


def new_root(cluster: str, now: float) -> Root:
    """Return a new root, which may issue leaf certificates and no other authorities."""
    key, name = ec.generate_private_key(ec.SECP256R1()), root_name(cluster)
    public = key.public_key()
    certificate = (
        certificate_builder(name, name, now - SKEW_S, now + ROOT_LIFE_S)
        .public_key(public)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(sign_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Root(certificate, key)


def roots_file(roots: Roots) -> bytes:
    """Return the content of the roots' file: each key before its certificate.

    The former root has no key.
    """
    parts = []
    for root in roots.trusted():
        parts += [key_pem(root.key)] if root.key is not None else []
        parts.append(root.pem.encode())
    return b"".join(parts)


def parse_roots(text: bytes) -> Roots:
    """Return the roots of a file, or raise `ValueError` (also TypeError, `UnsupportedAlgorithm`).

    A file of an earlier release has one key and one certificate, which is the same form.
    """
    key: ec.EllipticCurvePrivateKey | None = None
    issuing: list[Root] = []
    former: list[Root] = []
    for block in _BLOCK.finditer(text):
        if block[1].endswith(b"PRIVATE KEY"):
            loaded = serialization.load_pem_private_key(block[0], None)
            if not isinstance(loaded, ec.EllipticCurvePrivateKey):
                raise TypeError("the key is not an elliptic-curve key")
            key = loaded
        else:
            root = Root(x509.load_pem_x509_certificate(block[0]), key)
            (former if key is None else issuing).append(root)
            if key is not None and root.certificate.public_key() != key.public_key():
                raise LookupError("key and certificate do not match")
            key = None
    if not 1 <= len(issuing) <= 2 or len(former) > 1:
        raise ValueError("the key of the certificate is missing")
    coming = issuing[1] if len(issuing) > 1 else None
    return Roots(issuing[0], coming, former[0] if former else None)


def roots_after(roots: Roots, step: Step, new: Root) -> Roots:
    """Return the roots after a step, or raise `Conflict` if another step is next."""
    if step is Step.PREPARE:
        if roots.coming is not None:
            raise Conflict("a new root already exists", hint="twinectl authority activate")
        if roots.former is not None:
            raise Conflict(
                "the former root is still trusted", hint="first run twinectl authority retire"
            )
        return replace(roots, coming=new)
    if step is Step.RETIRE:
        if roots.former is None:
            raise Conflict("there is no former root", hint="twinectl authority show")
        return replace(roots, former=None)
    if roots.coming is None:
        raise Conflict("there is no new root yet", hint="first run twinectl authority prepare")
    if step is Step.ABANDON:
        return replace(roots, coming=None)
    return Roots(roots.coming, former=replace(roots.active, key=None))


def is_behind(roots: Roots, trust: HostTrust | None) -> bool:
    """Return whether a host has to renew to trust these roots."""
    hashes = {root.ca_hash for root in roots.trusted()}
    return trust is None or set(trust.trusts) != hashes or trust.issuer != roots.active.ca_hash


def lockouts(
    roots: Roots,
    step: Step,
    hosts: Mapping[str, HostTrust | None],
    credentials: Sequence[IssuedCredential],
) -> list[str]:
    """Return the hosts and users that a step would lock out, as text; none: it is safe.

    `hosts` are all joined hosts with their last reports; `credentials` are the unexpired files of
    users and controllers, which are not renewed.
    """
    if step is Step.ACTIVATE and roots.coming is not None:
        wanted = roots.coming.ca_hash
        not_ready = [h for h, t in hosts.items() if t is None or wanted not in t.trusts]
        old = [c for c in credentials if wanted not in c.trusts]
        return _lockout_lines(
            not_ready, "do not know the new root yet", old, "was created before it"
        )
    if step is Step.RETIRE and roots.former is not None:
        wanted = roots.active.ca_hash
        not_ready = [h for h, t in hosts.items() if t is None or t.issuer != wanted]
        old = [c for c in credentials if c.issuer != wanted]
        return _lockout_lines(
            not_ready, "have a certificate of the former root", old, "was issued by it"
        )
    return []


def _lockout_lines(
    hosts: Sequence[str], hosts_why: str, old: Sequence[IssuedCredential], old_why: str
) -> list[str]:
    found = []
    if hosts:
        found.append(f"{len(hosts)} hosts {hosts_why}: {some_of(sorted(hosts), _NAMED)}")
    names = sorted({f"{c.role} {c.name}" for c in old})
    found += [f"the credential of {name} {old_why}" for name in names[:_NAMED]]
    if len(names) > _NAMED:
        found.append(f"and the credentials of {len(names) - _NAMED} others")
    return found
