"""Records that mark the machines of a data center as kept in a store of their own."""

from __future__ import annotations

import msgspec


class BrokerStoreNote(msgspec.Struct, frozen=True, kw_only=True):
    """A record in the main store: the separate store of a data center's machines."""

    schema: int = 1
    datacenter: str
    folder: str
    """The last configured folder; for messages."""


class BrokerStoreOwner(msgspec.Struct, frozen=True, kw_only=True):
    """A record in a separate store: the region that its machines belong to."""

    schema: int = 1
    datacenter: str
    owner: str
    """The identity of the main store."""
