"""A term: one life of a control plane's process, as it says with each request to an agent."""

from __future__ import annotations

import re
from dataclasses import dataclass

HEADER = "Twine-Term"
"""Of each request of a control plane to an agent: `NAME/BEGAN/NOW`."""
_TERM = re.compile(r"([0-9a-f]{16})/(\d{1,18})/(\d{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Term:
    """One life of a control plane, and how far its store has come."""

    name: str
    """16 hexadecimal digits, by chance."""
    began: int
    """Revision of the store when it was opened."""
    now: int
    """Newest revision that was known to be on disk."""

    def text(self) -> str:
        """Return it as it crosses the wire, and as it lies on the host's disk."""
        return f"{self.name}/{self.began}/{self.now}"


def read_term(text: str) -> Term | None:
    """Return the term of such a text; None where it is none."""
    found = _TERM.fullmatch(text.strip())
    return Term(found[1], int(found[2]), int(found[3])) if found else None
