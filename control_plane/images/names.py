"""Names of images: each means one digest, and may be moved to another one later.

A job is applied with a digest, so moving a name changes no running task. All names are in one file
next to the images, which is replaced as a whole.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from wire import durable
from wire.errors import Conflict, Forbidden, HostError

log = logging.getLogger(__name__)
NAMES_MAX = 10_000
"""Largest number of names of one image store."""


class _Named(msgspec.Struct, frozen=True, kw_only=True):
    """The image that a name means, and the user who assigned the name first."""

    digest: str
    owner: str = ""


class ImageNames:
    """Owner of the names of an image store. Calls block on the disk."""

    def __init__(self, folder: Path) -> None:
        """Read the file; an unreadable one is logged and stays as it is, and no name is given."""
        self._path = folder / "names"
        self._names: dict[str, _Named] = {}
        self._damage = ""
        """Why the file cannot be read; empty: it can."""
        try:
            data = self._path.read_bytes()
            self._names = msgspec.json.decode(data, type=dict[str, _Named])
        except FileNotFoundError:
            pass
        except (OSError, UnicodeError, msgspec.DecodeError) as e:
            self._damage = str(e)
            log.error("the names of images cannot be read", extra={"reason": str(e)})

    def names_of(self, digest: str) -> list[str]:
        """Return the names that mean an image, in order."""
        return sorted(name for name, known in list(self._names.items()) if known.digest == digest)

    def assign(self, name: str, digest: str, by: str) -> None:
        """Assign a name to an image; an operator (`by` empty) may move names of other users."""
        if self._damage:  # the name may belong to another user, and its file would be replaced
            raise HostError(
                f"cannot name image {digest}: the names in {self._path} cannot be read: "
                f"{self._damage}",
                hint="restore this file, or remove it if its names may be lost; then restart the "
                "control plane",
            )
        known = self._names.get(name)
        if known is not None and by and known.owner != by:
            raise Forbidden(
                f"the image name {name} belongs to {known.owner or 'an operator'}",
                hint="choose another one, or ask the owner to assign it to this image",
            )
        if known is None and len(self._names) >= NAMES_MAX:
            raise Conflict(
                (f"the maximum of {NAMES_MAX} names of images exists already"), hint="remove images"
            )
        owner = known.owner if known is not None else by
        self._save({**self._names, name: _Named(digest=digest, owner=owner)})

    def remove_all(self, digest: str) -> None:
        """Remove the names of an image."""
        left = {name: known for name, known in self._names.items() if known.digest != digest}
        if len(left) != len(self._names):
            self._save(left)

    def _save(self, names: dict[str, _Named]) -> None:
        durable.write(self._path, msgspec.json.encode(names))
        self._names = names
