"""What a verified certificate says: the identity of its holder, and when it is valid."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

IDENTITY = re.compile(
    r"spiffe://(?P<cluster>[a-z0-9][a-z0-9.-]{0,253})"
    r"/(?P<role>host|component|user|controller)/(?P<name>[a-z0-9][a-z0-9._-]{0,62})"
)
"""The identity of a caller of a front end; tasks have identities of another form."""


def identity_in(certificate: Mapping[str, Any]) -> str:
    """Return the identity (URI) in a verified certificate; empty: it has none."""
    names = [v for kind, v in certificate.get("subjectAltName", ()) if kind == "URI"]
    return names[0] if len(names) == 1 and IDENTITY.fullmatch(names[0]) else ""


def ends_at(certificate: Mapping[str, Any]) -> float:
    """Return when a certificate ends, in seconds since 1970; infinity for none."""
    text = certificate.get("notAfter")
    return float("inf") if not text else _unix_seconds(text)


def begins_at(certificate: Mapping[str, Any]) -> float:
    """Return when a certificate begins, in seconds since 1970; 0 for none."""
    text = certificate.get("notBefore")
    return 0.0 if not text else _unix_seconds(text)


@lru_cache(maxsize=4096)
def _unix_seconds(text: str) -> float:
    return float(ssl.cert_time_to_seconds(text))
