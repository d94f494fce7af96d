"""Credentials on disk, and the TLS contexts made from them.

A credential is one file with everything in it. So it is replaced in one step, and a key always
matches its certificate. Contexts in use follow a renewal: open connections keep the old
certificate, new connections use the new certificate and its authorities.
"""

from __future__ import annotations

import asyncio.sslproto
import os
import ssl
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from wire import durable
from wire.errors import ConfigError, TwineError
from wire.peers import expect_peer

CONTROL_PLANE = "/component/control-plane"
"""The identity that a host and a user expect behind the control plane's address."""
FRONT_END = "/component/front-end"
API_SERVERS = f"{CONTROL_PLANE}|{FRONT_END}"
"""The servers that a user's client accepts: a control plane, or a front end that forwards to it."""
READ_BYTES = 32 << 10
"""Bytes that a TLS connection reads at once: two of the longest records (RFC 8446, 5.1). asyncio
keeps a buffer of this size for each open connection; its default is 256 KiB. One end of a
connection took 279 KiB with the default and takes 59 KiB with this. Transferring 100 MiB takes
18 % more CPU."""
asyncio.sslproto.SSLProtocol.max_size = READ_BYTES


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """A key, its certificate, and the control plane that accepts it."""

    name: str
    """Name of the machine or user."""
    url: str
    """Of the control plane: `https://host:port`."""
    key_pem: str
    certificate_pem: str
    ca_pem: str
    """The trusted authorities: one, or two during a rotation."""
    issued_at: float
    """Seconds since 1970, by the clock of the holder."""
    not_after: float
    cluster: str = ""
    """Trust domain of its authority; empty in a file of an earlier release."""

    def __repr__(self) -> str:
        """Keep the key out of logs and tracebacks."""
        return f"Credential(name={self.name!r}, url={self.url!r})"


def save(credential: Credential, path: Path) -> None:
    """Write the credential in one step, readable only by its owner (0600)."""
    durable.write(path, msgspec.json.encode(credential))


def load(path: Path) -> Credential:
    """Return the credential of a file, or raise `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Credential)
    except OSError as e:
        raise ConfigError(f"cannot read the credential {path}: {e.strerror}") from e
    except (msgspec.DecodeError, UnicodeError) as e:
        raise ConfigError(
            f"{path} is not a valid credential",
            hint="create a new one; this one cannot be repaired",
        ) from e


EXPECTED_SERVER: ContextVar[str] = ContextVar("expected peer", default="")
"""Identity of the server that the current asyncio task calls, such as `/host/vm1`. For contexts
that serve many peers: a context takes 30 KiB and 2 ms to renew, too much for one per machine."""


ContextMaker = Callable[[Credential], ssl.SSLContext]
CertificateCheck = Callable[[Mapping[str, Any]], None]
"""Checks a verified certificate, and raises `TwineError` to refuse it."""


class _CheckedObject(ssl.SSLObject):
    """Fails the handshake if the other end is not the expected server."""

    expected: str = ""
    domain: str = ""
    check_certificate: CertificateCheck | None = None

    def do_handshake(self) -> None:
        super().do_handshake()
        try:
            certificate = self.getpeercert()
            expect_peer(certificate, self.expected or "no host", self.domain)
            if self.check_certificate is not None:
                self.check_certificate(certificate or {})
        except TwineError as e:
            raise ssl.SSLCertVerificationError(1, str(e)) from e


class _Context(ssl.SSLContext):
    """An SSL context that can be swapped; holders get the new one on their next connection."""

    successor: ssl.SSLContext | None = None

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        if self.successor is not None:
            return self.successor.wrap_bio(*args, **kwargs)
        return super().wrap_bio(*args, **kwargs)


class RenewedContexts:
    """Contexts of one identity, which all change to a new credential at once.

    The library can replace the certificate of a context, but cannot remove an authority from it.
    So each context gets a successor. Open connections continue.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[_Context, ContextMaker] = weakref.WeakKeyDictionary()

    def add(self, make: ContextMaker, credential: Credential) -> ssl.SSLContext:
        """Return a context that follows every later credential."""
        context = make(credential)
        assert isinstance(context, _Context)
        self._made[context] = make
        return context

    def renew(self, credential: Credential) -> None:
        """Change all contexts to a credential; new connections use it."""
        for context, make in self._made.items():
            context.successor = make(credential)


class _ClientContext(_Context):
    """Checks the URI of the server's certificate, in addition to authority and address."""

    sslobject_class = _CheckedObject
    expected: str = ""
    """Identity of the server; empty: taken from `EXPECTED_SERVER`."""
    domain: str = ""
    """Trust domain of the server; empty: any trust domain of this authority."""
    check_certificate: CertificateCheck | None = None

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        wrapped = super().wrap_bio(*args, **kwargs)
        if self.successor is not None:
            return wrapped
        assert isinstance(wrapped, _CheckedObject)
        wrapped.expected = self.expected or EXPECTED_SERVER.get()
        wrapped.domain, wrapped.check_certificate = self.domain, self.check_certificate
        return wrapped


def unverified_context() -> ssl.SSLContext:
    """Return a context that trusts any server. Use it only to fetch data that a pin verifies."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def pinned_context(ca_pem: str, expected: str) -> ssl.SSLContext:
    """Return a client context that accepts only `expected`, certified by one authority.

    `expected` is the path of the server's identity, such as `/host/vm1`; the certificate
    must also be valid for the address that was called.
    """
    context = _ClientContext(ssl.PROTOCOL_TLS_CLIENT)
    context.expected = expected
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    _load_authorities(context, ca_pem)
    return context


def client_context(
    credential: Credential, expected: str, check_certificate: CertificateCheck | None = None
) -> ssl.SSLContext:
    """Return a context to call `expected` as the holder of the credential.

    If `expected` is empty, `EXPECTED_SERVER` names the server of each connection.
    `check_certificate` is called with each certificate of a server.
    """
    context = pinned_context(credential.ca_pem, expected)
    assert isinstance(context, _ClientContext)
    context.domain, context.check_certificate = credential.cluster, check_certificate
    install(context, credential)
    return context


def server_context(credential: Credential, *, require_client: bool) -> ssl.SSLContext:
    """Return a context to serve as the holder; only clients of the same authority get in.

    With `require_client` false a client may come without a certificate (a joining host has
    none), but a bad certificate is refused. There are no session tickets: each connection proves
    the client's identity again, so that no session outlives an identity.
    """
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.verify_mode = ssl.CERT_REQUIRED if require_client else ssl.CERT_OPTIONAL
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.options |= ssl.OP_NO_RENEGOTIATION
    _load_authorities(context, credential.ca_pem)
    install(context, credential)
    return context


def _load_authorities(context: ssl.SSLContext, ca_pem: str) -> None:
    try:
        context.load_verify_locations(cadata=ca_pem)
    except (ssl.SSLError, ValueError) as e:
        raise ConfigError("the authority's certificate is not valid") from e


def install(context: ssl.SSLContext, credential: Credential) -> None:
    """Put key and certificate into a context, also into one that is in use.

    The library reads them only from a file. They are passed in a memory file, so that the key is
    not written to disk again. Raises `ConfigError` if they do not match.
    """
    fd = os.memfd_create("credential", os.MFD_CLOEXEC)
    try:
        text = f"{credential.key_pem}\n{credential.certificate_pem}".encode()
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(text)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    except ssl.SSLError as e:
        raise ConfigError(
            f"the key and the certificate of {credential.name} do not match, or one of them is "
            "damaged"
        ) from e
    finally:
        os.close(fd)
