"""Ed25519 signatures of images (RFC 8032): keys, signing and checking (docs/adr/0104).

The library is loaded only to make or check a signature. An agent without a policy does not
load it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable

from wire.errors import InvalidInput

PREFIX = "ed25519:"
_HINT = "make one with `twinectl image key FILE --new`, or openssl genpkey -algorithm ed25519"


def statement(name: str, digest: str) -> bytes:
    """Return the signed text of an image: these three lines and nothing else.

    The first line separates image signatures from signatures for other purposes. Neither a name
    nor a digest can contain a newline.
    """
    return f"twine image signature v1\nname {name}\ndigest {digest}\n".encode()


def new_key() -> bytes:
    """Return a new private key, as PEM (PKCS #8)."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def public_key(pem: bytes) -> str:
    """Return the public key of a private or public key in PEM form, as `ed25519:<base64>`.

    Raises `InvalidInput` for other text.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if b"PUBLIC KEY" not in pem:
        return _load_private_key(pem)[0]
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as e:
        raise InvalidInput("this is not a public key in PEM form", hint=_HINT) from e
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInput("the public key is not one of Ed25519", hint=_HINT)
    return _key_text(key.public_bytes_raw())


def sign(pem: bytes, name: str, digest: str) -> tuple[str, str]:
    """Return the public key of a private key, and its signature of an image in base64."""
    text, signer = _load_private_key(pem)
    return text, base64.b64encode(signer(statement(name, digest))).decode()


def is_signed(key: str, signature: str, name: str, digest: str) -> bool:
    """Return whether this key signed this image under this name; False if malformed."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        raw = base64.b64decode(key.removeprefix(PREFIX), validate=True)
        made = base64.b64decode(signature, validate=True)
        Ed25519PublicKey.from_public_bytes(raw).verify(made, statement(name, digest))
    except (InvalidSignature, ValueError, binascii.Error):
        return False
    return key.startswith(PREFIX)


def _load_private_key(pem: bytes) -> tuple[str, Callable[[bytes], bytes]]:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as e:
        reason = "this is not a private key in PEM form, or it is locked by a password"
        raise InvalidInput(reason, hint=_HINT) from e
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInput("the private key is not one of Ed25519", hint=_HINT)
    return _key_text(key.public_key().public_bytes_raw()), key.sign


def _key_text(raw: bytes) -> str:
    return PREFIX + base64.b64encode(raw).decode()
