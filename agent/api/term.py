"""How a control plane identifies itself in each request to an agent.

A `Term` is one life of a control plane's process and its store. An `OwnerTerm` names the
entitlement that the machine belongs to, and the term in which the sender owns it (docs/adr/0150).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEADER = "Twine-Term"
"""Header of each request of a control plane to an agent: `NAME/BEGAN/NOW`."""
OWNER_HEADER = "Twine-Owner"
"""Header of each request to a machine that belongs to an entitlement: `ENTITLEMENT/NUMBER`."""
_OWNER = re.compile(r"([a-z0-9-]{1,128})/(\d{1,16})", re.ASCII)
_TERM = re.compile(r"([0-9a-f]{16})/(\d{1,18})/(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Term:
    """One life of a control plane, and how far its store has come."""

    name: str
    """16 random hexadecimal digits."""
    began: int
    """Revision of the store when it was opened."""
    now: int
    """Newest revision that was known to be on disk."""

    def text(self) -> str:
        """Return its text form, for the wire and the host's disk."""
        return f"{self.name}/{self.began}/{self.now}"


def read_term(text: str) -> Term | None:
    """Return the term of a text form; None if it is malformed."""
    found = _TERM.fullmatch(text.strip())
    return Term(found[1], int(found[2]), int(found[3])) if found else None


@dataclass(frozen=True, slots=True)
class OwnerTerm:
    """An entitlement, and the term in which the sender owns it."""

    entitlement: str
    number: int
    """Rises with each move to another shard, and with each new leader of the shard."""

    def text(self) -> str:
        """Return its text form, for the wire and the host's disk."""
        return f"{self.entitlement}/{self.number}"


def read_owner(text: str) -> OwnerTerm | None:
    """Return the term of a text form; None if it is malformed."""
    found = _OWNER.fullmatch(text.strip())
    return OwnerTerm(found[1], int(found[2])) if found else None
