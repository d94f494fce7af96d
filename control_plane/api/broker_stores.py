"""What says that the machines of a data center are in a store of their own."""

from __future__ import annotations

import msgspec


class BrokerStoreNote(msgspec.Struct, frozen=True, kw_only=True):
    """In the main store: where the machines of a data center are, while that is elsewhere."""

    schema: int = 1
    datacenter: str
    folder: str
    """As it was configured last; for messages."""


class BrokerStoreOwner(msgspec.Struct, frozen=True, kw_only=True):
    """In a store of its own: whose machines it is for."""

    schema: int = 1
    datacenter: str
    owner: str
    """The identity of the main store."""
