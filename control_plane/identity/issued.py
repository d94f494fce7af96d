"""Records of credentials that `twine-control-plane user add | controller` wrote to files.

The command runs while the control plane owns the store, so the records are files, one for each
credential, and are deleted once it has expired.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from control_plane.api.people import IssuedCredential, Revocation, Users, UserView
from wire import durable

FOLDER = "credentials"
_MAX = 100_000


def note(folder: Path, issued: IssuedCredential) -> None:
    """Record a credential."""
    name = f"{issued.role}-{issued.name}@{issued.issued_at:.6f}.json"
    durable.write(folder / name, msgspec.json.encode(issued))


def read(folder: Path, now: float) -> list[IssuedCredential]:
    """Return the unexpired credentials, and delete the records of expired ones."""
    found: list[IssuedCredential] = []
    for path in sorted(folder.glob("*.json"))[:_MAX]:
        try:
            issued = msgspec.json.decode(path.read_bytes(), type=IssuedCredential)
        except (OSError, msgspec.DecodeError):
            continue  # a record only informs users; nothing depends on it
        if issued.not_after > now:
            found.append(issued)
        else:
            path.unlink(missing_ok=True)
    return found


def users(issued: list[IssuedCredential], revoked: list[Revocation]) -> Users:
    """Return the users of these credentials and revocations, by name."""
    views: dict[str, UserView] = {}
    for one in (found for found in issued if found.role == "user"):
        known = views.get(one.name, UserView(name=one.name))
        views[one.name] = msgspec.structs.replace(
            known,
            issued_at=max(one.issued_at, known.issued_at or 0.0),
            not_after=max(one.not_after, known.not_after or 0.0),
        )
    for gone in revoked:
        if gone.role == "user":
            known = views.get(gone.name, UserView(name=gone.name))
            views[gone.name] = msgspec.structs.replace(known, revoked_at=gone.at)
    return Users(users=[views[name] for name in sorted(views)])
