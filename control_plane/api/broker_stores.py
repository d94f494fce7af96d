"""Records that mark the machines of a data center as kept in a store of their own."""

from __future__ import annotations

import msgspec


class BrokerStoreNote(msgspec.Struct, frozen=True, kw_only=True):
    """In the main store: where the machines of a data center are, if elsewhere."""

    schema: int = 1
    datacenter: str
    folder: str
    """As it was configured last; for messages."""


class BrokerStoreOwner(msgspec.Struct, frozen=True, kw_only=True):
    """In a store of its own: the region that its machines belong to."""

    schema: int = 1
    datacenter: str
    owner: str
    """The identity of the main store."""
