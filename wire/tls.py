"""Credentials on disk, and the TLS contexts made from them.

A credential is one file with everything in it, so that it is replaced in one step and a key
is never beside the wrong certificate. Contexts that are in use follow a renewal: connections that
stand keep what they have, new ones use the new certificate and the authorities that came with it.
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
ENTRANCES = f"{CONTROL_PLANE}|{FRONT_END}"
"""Whom a user's client may reach: a control plane, or a front end that speaks for users to one."""
READ_BYTES = 32 << 10
"""What a TLS connection reads at once: two of the longest records (RFC 8446, 5.1). asyncio keeps a
buffer of this size for each connection as long as it stands, 256 KiB if nothing else is said: an
end of a connection took 279 KiB with that and 59 KiB with this, and 100 MiB 18 % more CPU."""
asyncio.sslproto.SSLProtocol.max_size = READ_BYTES


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """A key, its certificate, and where it is good for."""

    name: str
    """Name of the machine or user."""
    url: str
    """Of the control plane: `https://host:port`."""
    key_pem: str
    certificate_pem: str
    ca_pem: str
    """The authorities that are trusted: one, or two while one follows the other."""
    issued_at: float
    """Seconds since 1970, by the clock of the holder."""
    not_after: float
    cluster: str = ""
    """Trust domain of its authority; empty in a file of an earlier release."""

    def __repr__(self) -> str:
        """Keep the key out of logs and tracebacks."""
        return f"Credential(name={self.name!r}, url={self.url!r})"


def save(credential: Credential, path: Path) -> None:
    """Write the credential for its owner's eyes only (0600), in one step."""
    durable.write(path, msgspec.json.encode(credential))


def load(path: Path) -> Credential:
    """Return the credential of a file, or raise `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Credential)
    except OSError as e:
        raise ConfigError(f"cannot read the credential {path}: {e.strerror}") from e
    except (msgspec.DecodeError, UnicodeError) as e:
        raise ConfigError(
            f"{path} is not a credential, or a damaged one",
            hint="make a new one; this one cannot be repaired",
        ) from e


EXPECTED: ContextVar[str] = ContextVar("expected peer", default="")
"""Whom the present task calls, for contexts that serve many peers: `/host/vm1`. A context
takes 30 KiB and is renewed in 2 ms, which is too much for one per machine."""


Maker = Callable[[Credential], ssl.SSLContext]
Judge = Callable[[Mapping[str, Any]], None]
"""Looks at a verified certificate, and raises `TwineError` where it is not to be believed."""


class _CheckedObject(ssl.SSLObject):
    """Ends the handshake in an error if the other end is not the expected one."""

    expected: str = ""
    domain: str = ""
    judge: Judge | None = None

    def do_handshake(self) -> None:
        super().do_handshake()
        try:
            certificate = self.getpeercert()
            expect_peer(certificate, self.expected or "no host", self.domain)
            if self.judge is not None:
                self.judge(certificate or {})
        except TwineError as e:
            raise ssl.SSLCertVerificationError(1, str(e)) from e


class _Context(ssl.SSLContext):
    """Can be replaced while it is in use: who holds it makes connections of its successor."""

    successor: ssl.SSLContext | None = None

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        if self.successor is not None:
            return self.successor.wrap_bio(*args, **kwargs)
        return super().wrap_bio(*args, **kwargs)


class Followers:
    """Contexts of one identity: each new credential counts in all of them at once.

    The library can put another certificate into a context, but take no authority out of it; so
    each context is followed by another one. Connections that stand go on.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[_Context, Maker] = weakref.WeakKeyDictionary()

    def add(self, make: Maker, credential: Credential) -> ssl.SSLContext:
        """Return a context that follows every later credential."""
        context = make(credential)
        assert isinstance(context, _Context)
        self._made[context] = make
        return context

    def take(self, credential: Credential) -> None:
        """Use a credential from now on."""
        for context, make in self._made.items():
            context.successor = make(credential)


class _ClientContext(_Context):
    """Checks the URI of the server's certificate besides authority and address."""

    sslobject_class = _CheckedObject
    expected: str = ""
    """Which identity must answer; empty: the one that `EXPECTED` of the task names, or none."""
    domain: str = ""
    """Trust domain of who answers; empty: any of this authority's."""
    judge: Judge | None = None

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        wrapped = super().wrap_bio(*args, **kwargs)
        if self.successor is not None:
            return wrapped
        assert isinstance(wrapped, _CheckedObject)
        wrapped.expected = self.expected or EXPECTED.get()
        wrapped.domain, wrapped.judge = self.domain, self.judge
        return wrapped


def unverified_context() -> ssl.SSLContext:
    """Return a context that trusts any server: only to fetch what is then compared with a pin."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def pinned_context(ca_pem: str, expected: str) -> ssl.SSLContext:
    """Return a client context that trusts one authority, and there only `expected`.

    `expected` is the path of the server's identity, such as `/host/vm1`; the certificate
    must also be valid for the address that was called.
    """
    context = _ClientContext(ssl.PROTOCOL_TLS_CLIENT)
    context.expected = expected
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    _trust(context, ca_pem)
    return context


def client_context(
    credential: Credential, expected: str, judge: Judge | None = None
) -> ssl.SSLContext:
    """Return a context to call `expected` as the holder of the credential.

    If that is empty, each connection says in `EXPECTED` whom it is for. `judge` looks at each
    certificate that is shown.
    """
    context = pinned_context(credential.ca_pem, expected)
    assert isinstance(context, _ClientContext)
    context.domain, context.judge = credential.cluster, judge
    install(context, credential)
    return context


def server_context(credential: Credential, *, require_client: bool) -> ssl.SSLContext:
    """Return a context to serve as the holder; only clients of the same authority get in.

    With `require_client` false a client may come without a certificate (a host that joins
    has none yet), but none that comes with a bad one. There are no tickets: each connection
    proves the identity of its other end again, so that no session outlives an identity.
    """
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.verify_mode = ssl.CERT_REQUIRED if require_client else ssl.CERT_OPTIONAL
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.options |= ssl.OP_NO_RENEGOTIATION
    _trust(context, credential.ca_pem)
    install(context, credential)
    return context


def _trust(context: ssl.SSLContext, ca_pem: str) -> None:
    try:
        context.load_verify_locations(cadata=ca_pem)
    except (ssl.SSLError, ValueError) as e:
        raise ConfigError("the authority's certificate is no certificate, or a damaged one") from e


def install(context: ssl.SSLContext, credential: Credential) -> None:
    """Put key and certificate into a context, also into one that is in use.

    The library reads them from a file only; they are handed over in one that has no name,
    so that the key is on no second disk block. Raises `ConfigError` if they do not match.
    """
    fd = os.memfd_create("credential", os.MFD_CLOEXEC)
    try:
        text = f"{credential.key_pem}\n{credential.certificate_pem}".encode()
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(text)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    except ssl.SSLError as e:
        raise ConfigError(
            f"the key and the certificate of {credential.name} do not belong together,"
            " or one of them is damaged"
        ) from e
    finally:
        os.close(fd)
