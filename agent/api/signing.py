"""Signatures of images, and the keys that are trusted (docs/security.md, docs/adr/0104)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.ranges import END, Written
from wire.signatures import is_signed

MAX_KEYS = 16
MAX_SIGNATURES = 16
SIGN_HINT = "sign it with such a key: twinectl image sign DIGEST --name NAME --key FILE"

ImageName = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]([a-z0-9._/:+-]{0,126}[a-z0-9])?" + END,
        max_length=128,
        description="1 to 128 of a-z, 0-9 and ._/:+-, with a letter or digit at the start and end",
    ),
]
PublicKey = Annotated[
    str,
    Meta(
        pattern=r"^ed25519:[A-Za-z0-9+/]{43}=" + END,
        max_length=52,
        description="ed25519: and 32 bytes in base64, as `twinectl image key` prints them",
    ),
]
SignatureText = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9+/]{86}==" + END, max_length=88, description="64 bytes in base64"),
]
PublicKeys = Annotated[list[PublicKey], Meta(max_length=MAX_KEYS)]


class ImageSignature(Written, frozen=True, kw_only=True):
    """The signature of one key that a digest is an image of this name."""

    name: ImageName
    """Name that the signer gave the image; part of the signed text."""
    key: PublicKey
    """The key that signed it."""
    signature: SignatureText
    """Signature of `wire.signatures.statement(name, digest)`."""


Signatures = Annotated[list[ImageSignature], Meta(max_length=MAX_SIGNATURES)]


class NamedImage(Written, frozen=True, kw_only=True):
    """A new name of an image in the image store."""

    name: ImageName


class ImageTrust(Written, frozen=True, kw_only=True):
    """The keys that may sign an image, and the signatures that it has."""

    keys: PublicKeys = []
    """One of these keys must have signed the image; empty: no signature is needed."""
    signatures: Signatures = []


def distrust(digest: str, trust: ImageTrust) -> str:
    """Return why an image must not be used; empty: it may be used."""
    if not trust.keys:
        return ""
    those = [s for s in trust.signatures if s.key in trust.keys]
    if any(is_signed(s.key, s.signature, s.name, digest) for s in those):
        return ""
    count = len(trust.keys)
    wanted = "the key" if count == 1 else f"any of the {count} keys"
    if those:
        found = "the stored signature does not match this image"
    else:
        found = "only other keys signed it" if trust.signatures else "it has no signature"
    return f"image {digest} is not signed with {wanted}, which its entitlement requires: {found}"
