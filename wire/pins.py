"""Pins of authorities: hashes that operators pass to a host and that hosts report as trusted."""

from __future__ import annotations

import hashlib
import ssl

from wire.errors import ConfigError

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def ca_hash(ca_pem: str) -> str:
    """Return the pin of an authority: `sha256:<hex>` over its first certificate (DER)."""
    return "sha256:" + hashlib.sha256(_first_der(ca_pem)).hexdigest()


def ca_hashes(ca_pem: str) -> list[str]:
    """Return the pins of all authorities of a PEM text, in its order."""
    return [ca_hash(_BEGIN + part) for part in ca_pem.split(_BEGIN)[1:]]


def first_certificate(pem: str) -> str:
    """Return only the first certificate of a PEM text."""
    return ssl.DER_cert_to_PEM_cert(_first_der(pem))


def _first_der(pem: str) -> bytes:
    start, stop = pem.find(_BEGIN), pem.find(_END)
    try:
        if start < 0 or stop < start:
            raise ValueError("no PEM block")
        return ssl.PEM_cert_to_DER_cert(pem[start : stop + len(_END)])
    except ValueError as e:
        raise ConfigError("this is not a valid certificate in PEM form") from e
