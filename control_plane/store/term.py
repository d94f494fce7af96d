"""The term of this process: what it says of its store with each request to an agent."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from agent.api.term import HEADER, Term
from control_plane.store.protocol import Store


class OwnTerm:
    """Begins when it is made, with the store just opened."""

    def __init__(self, store: Store) -> None:
        """Take the store's revision before anything of this process is written."""
        self._store, self._name, self._began = store, secrets.token_hex(8), store.revision()

    def headers(self) -> Mapping[str, str]:
        """Return what a request says: nothing is read for it but a number in memory."""
        return {HEADER: Term(self._name, self._began, self._store.revision()).text()}
