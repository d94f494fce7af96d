"""Certificates of the region: names, extensions, and validity."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT_LIFE_S = 10 * 365 * 86_400.0
SKEW_S = 3_600.0
"""Certificates are valid from an hour ago, so that a host whose clock is slow accepts them."""


def root_name(cluster: str) -> x509.Name:
    """Return the name of a region's authority; all its roots have it."""
    return common_name(f"Twine authority of {cluster}")


def certificate_builder(
    subject: x509.Name, issuer: x509.Name, start: float, end: float
) -> x509.CertificateBuilder:
    """Return a builder of a certificate, valid from `start` to `end` (seconds since 1970)."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(start, UTC))
        .not_valid_after(datetime.fromtimestamp(end, UTC))
    )


def key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    """Return what a key may be used for: to issue, or to prove an identity."""
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a key in PEM form."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def common_name(text: str) -> x509.Name:
    """Return a text as an X.509 name, cut to the 64 characters that X.509 accepts."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])
