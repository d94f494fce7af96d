"""Explains to people why a connection, a file or a document could not be used.

Messages of libraries are hard to read (`Cannot connect to host … ssl:default [Connect call failed
…]`). Here the text follows from the kind of failure and its number.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl

_BY_NUMBER = {
    errno.ECONNREFUSED: "nothing listens there (the connection was refused)",
    errno.EHOSTUNREACH: "there is no route to its host",
    errno.ENETUNREACH: "there is no route to its network",
    errno.ETIMEDOUT: "it did not answer in time",
    errno.ECONNRESET: "it closed the connection",
    errno.EPIPE: "it closed the connection",
    errno.ENOENT: "there is no such file",
    errno.EACCES: "this user may not open it",
    errno.EPERM: "this user may not do that",
    errno.ENOSPC: "the disk is full",
}
_TLS_WORDS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not issued by a trusted authority",
    "CERTIFICATE_EXPIRED": "this client's certificate has expired",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust this client's certificate",
    "CERTIFICATE_REQUIRED": "it requires a certificate and this client sent none",
    "WRONG_VERSION_NUMBER": "the server there does not speak TLS",
}
_VERIFY_WORDS = {
    10: "its certificate has expired",
    9: "its certificate is not valid yet; compare the clocks of both hosts",
    62: "its certificate is for another name",
    64: "its certificate is for another address",
}
"""By number of X509_V_ERR_… (OpenSSL, x509_vfy.h)."""
_ERRNO = re.compile(r"\[Errno (\d{1,4})\]")


def why(error: BaseException) -> str:
    """Return why something failed, without the wording of the library."""
    cause = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return _certificate_text(cause)
    if isinstance(cause, ssl.SSLError):
        return _TLS_WORDS.get(
            getattr(cause, "reason", None) or "", "the connection cannot be secured with TLS"
        )
    if isinstance(cause, socket.gaierror):
        return "its name cannot be resolved: no address was found for it"
    if isinstance(cause, TimeoutError):
        return "it did not answer in time"
    if isinstance(cause, ConnectionRefusedError):
        return _BY_NUMBER[errno.ECONNREFUSED]
    if isinstance(cause, OSError):
        return _errno_text(cause)
    return _KINDS.get(type(cause).__name__, "the connection broke off")


def not_utf8(error: UnicodeEncodeError) -> str:
    """Return which argument of a command has bytes of another encoding."""
    near = error.object[max(0, error.start - 40) : error.end + 40]
    return f"{near!r} is not UTF-8 text"


def _certificate_text(error: ssl.SSLCertVerificationError) -> str:
    code = getattr(error, "verify_code", None)
    if code is None and len(error.args) > 1:
        return str(error.args[1])  # the text of our own identity check (tls.py)
    return _VERIFY_WORDS.get(code or 0, "its certificate is not issued by a trusted authority")


def _errno_text(error: OSError) -> str:
    numbers = [error.errno] if error.errno else [int(n) for n in _ERRNO.findall(str(error))]
    found = list(dict.fromkeys(_BY_NUMBER.get(n, os.strerror(n)) for n in numbers))
    if found:
        return "; ".join(found)
    return _KINDS.get(type(error).__name__, "the connection broke off")


_KINDS = {
    "ServerDisconnectedError": "it closed the connection without an answer",
    "ClientPayloadError": "its answer was truncated",
    "ClientResponseError": "it does not speak valid HTTP",
    "InvalidURL": "this is not an address",
    "ServerTimeoutError": "it did not answer in time",
}
