"""Checks whether hosts will accept an image for an entitlement, by the signatures that it requires.

Hosts check images themselves. This check informs owners earlier, and in one place.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.api import ImagePull
from agent.api.signing import SIGN_HINT, ImageTrust, distrust
from control_plane.images.store import FindImage
from wire.errors import NotFound, Unprocessable


async def checked_trust(find: FindImage, digest: str, keys: Sequence[str]) -> ImageTrust:
    """Return what a host needs to check an image; `Unprocessable` if the host would refuse it."""
    trust = await _trust_of(find, digest, keys)
    if why := distrust(digest, trust):
        raise Unprocessable(why, hint=SIGN_HINT)
    return trust


async def distrust_reason(find: FindImage, digest: str, keys: Sequence[str]) -> str:
    """Return why no task may start from an image, empty if one may."""
    return distrust(digest, await _trust_of(find, digest, keys))


async def pull_request(
    find: FindImage, digest: str, keys: Sequence[str], machine: str
) -> ImagePull:
    """Return the request with which a host fetches an image; `NotFound` if the store lacks it."""
    image = await find(digest)
    if image is None:
        raise NotFound(
            f"cannot send image {digest} to machine {machine}: the image store no longer has it",
            hint="push it again",
        )
    return ImagePull(
        digest=digest,
        format=image.format,
        path=f"/v1/images/{digest}/stream",
        trust=await checked_trust(find, digest, keys),
    )


async def _trust_of(find: FindImage, digest: str, keys: Sequence[str]) -> ImageTrust:
    if not keys:
        return ImageTrust()
    image = await find(digest)
    return ImageTrust(keys=list(keys), signatures=[] if image is None else image.signatures)
