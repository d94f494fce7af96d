"""Whether hosts may be given an image for an entitlement: what it asks for, what the image has.

Hosts look themselves at what is sent here; this answers owners earlier, and in one place.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent.api.signing import SIGN_HINT, ImageTrust, distrust
from control_plane.images.store import FindImage
from wire.errors import Unprocessable


async def trust_in(find: FindImage, digest: str, keys: Sequence[str]) -> ImageTrust:
    """Return what to tell a host about an image; raise `Unprocessable` where it would refuse it."""
    trust = await _known(find, digest, keys)
    if why := distrust(digest, trust):
        raise Unprocessable(why, hint=SIGN_HINT)
    return trust


async def distrust_in(find: FindImage, digest: str, keys: Sequence[str]) -> str:
    """Return why no task may be started from an image, empty where one may."""
    return distrust(digest, await _known(find, digest, keys))


async def _known(find: FindImage, digest: str, keys: Sequence[str]) -> ImageTrust:
    if not keys:
        return ImageTrust()
    image = await find(digest)
    return ImageTrust(keys=list(keys), signatures=[] if image is None else image.signatures)
