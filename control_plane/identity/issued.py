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
_MAX_FILES = 100_000


def record_issued(folder: Path, issued: IssuedCredential) -> None:
    """Write the record of a credential."""
    name = f"{issued.role}-{issued.name}@{issued.issued_at:.6f}.json"
    durable.write(folder / name, msgspec.json.encode(issued))


def read_issued(folder: Path, now: float) -> list[IssuedCredential]:
    """Return the unexpired credentials, and delete the records of expired ones."""
    found: list[IssuedCredential] = []
    for path in sorted(folder.glob("*.json"))[:_MAX_FILES]:
        try:
            issued = msgspec.json.decode(path.read_bytes(), type=IssuedCredential)
        except (OSError, msgspec.DecodeError):
            continue  # a record only informs users; nothing depends on it
        if issued.not_after > now:
            found.append(issued)
        else:
            path.unlink(missing_ok=True)
    return found


def users_of(issued: list[IssuedCredential], revoked: list[Revocation]) -> Users:
    """Return the users of these credentials and revocations, by name."""
    views: dict[str, UserView] = {}
    for credential in (found for found in issued if found.role == "user"):
        known = views.get(credential.name, UserView(name=credential.name))
        views[credential.name] = msgspec.structs.replace(
            known,
            issued_at=max(credential.issued_at, known.issued_at or 0.0),
            not_after=max(credential.not_after, known.not_after or 0.0),
        )
    for revocation in revoked:
        if revocation.role == "user":
            known = views.get(revocation.name, UserView(name=revocation.name))
            views[revocation.name] = msgspec.structs.replace(known, revoked_at=revocation.at)
    return Users(users=[views[name] for name in sorted(views)])
