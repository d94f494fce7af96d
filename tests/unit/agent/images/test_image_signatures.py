"""A signature covers exactly one key, image and name; nothing else passes verification."""

from __future__ import annotations

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import api
from agent.api.signing import ImageSignature, ImageTrust, distrust
from wire import signatures
from wire.errors import InvalidInput
from wire.routes import decode_json

KEY, OTHER = signatures.new_key(), signatures.new_key()
DIGEST, ELSE = "sha256:" + "1" * 64, "sha256:" + "2" * 64
NAME = "web/1.4"
PUBLIC = signatures.public_key(KEY)


def a_signature(pem: bytes = KEY, name: str = NAME, digest: str = DIGEST) -> ImageSignature:
    key, signature = signatures.sign(pem, name, digest)
    return ImageSignature(name=name, key=key, signature=signature)


def trust(*made: ImageSignature, keys: tuple[str, ...] = (PUBLIC,)) -> ImageTrust:
    return ImageTrust(keys=list(keys), signatures=list(made))


def test_the_signed_statement_is_three_lines_and_unique_to_image_and_name() -> None:
    wanted = f"twine image signature v1\nname web/1.4\ndigest {DIGEST}\n"
    assert signatures.statement(NAME, DIGEST) == wanted.encode()
    assert signatures.statement("web/1.5", DIGEST) != signatures.statement(NAME, DIGEST)


def test_the_signature_of_one_of_the_keys_is_enough() -> None:
    unknown_key = signatures.public_key(OTHER)
    assert distrust(DIGEST, trust(a_signature(), keys=(unknown_key, PUBLIC))) == ""
    assert distrust(DIGEST, trust(a_signature(OTHER), a_signature())) == ""
    assert distrust(DIGEST, ImageTrust()) == "", "no policy, no signature"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ((), "it has no signature"),
        ((a_signature(OTHER),), "only other keys signed it"),
        ((a_signature(digest=ELSE),), "does not match this image"),
        (
            (ImageSignature(name="web/2", key=PUBLIC, signature=a_signature().signature),),
            "does not match",
        ),
        (
            (ImageSignature(name=NAME, key=PUBLIC, signature=a_signature(OTHER).signature),),
            "does not match this image",
        ),
    ],
)
def test_why_an_image_is_not_trusted(made: tuple[ImageSignature, ...], why: str) -> None:
    reported = distrust(DIGEST, trust(*made))
    assert why in reported
    assert DIGEST in reported


@given(st.integers(0, 63), st.integers(1, 255))
def test_a_signature_with_one_byte_changed_counts_for_nothing(at: int, change: int) -> None:
    good = a_signature()
    raw = bytearray(base64.b64decode(good.signature))
    raw[at] ^= change
    assert not signatures.is_signed(PUBLIC, base64.b64encode(raw).decode(), NAME, DIGEST)


@given(st.text(), st.text(max_size=200))
def test_random_bytes_are_no_signature_and_no_error(key: str, signature: str) -> None:
    assert not signatures.is_signed(key, signature, NAME, DIGEST)
    assert not signatures.is_signed(PUBLIC, signature, NAME, DIGEST)


@pytest.mark.parametrize("field", ["key", "signature", "name"])
def test_a_truncated_signature_is_refused_by_the_decoder(field: str) -> None:
    good = a_signature()
    parts = {f: getattr(good, f) for f in ("key", "name", "signature")}
    parts[field] = parts[field][:-1] if field != "name" else "web\n"
    text = str(parts).replace("'", '"')
    with pytest.raises(InvalidInput) as refused:
        decode_json(text.encode(), ImageSignature, "the signature")
    assert [e.field for e in refused.value.errors] == [field]


def test_keys_of_openssl_are_read_and_others_refused() -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    own = serialization.load_pem_private_key(KEY, None)
    public = own.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert signatures.public_key(public) == PUBLIC
    curve = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for pem, why in ((curve, "Ed25519"), (b"none", "PEM"), (KEY[:60], "PEM"), (public[:60], "PEM")):
        with pytest.raises(InvalidInput, match=why):
            signatures.public_key(pem)
    with pytest.raises(InvalidInput, match="private key"):
        signatures.sign(public, NAME, DIGEST)


def test_a_task_without_a_policy_sends_no_policy_to_older_agents() -> None:
    spec = api.TaskSpec(image=DIGEST, command=["/bin/true"])
    assert b"image_trust" not in msgspec.json.encode(spec)
