"""The control plane's durable store: keys, values, revisions, a watch.

`sqlite` is the durable engine, `memory` its model; both pass tests/contract/test_store.py.
`records` has the keys and the encoding of records.
docs/adr/0006-one-store-protocol-sqlite-first.md.
"""

from control_plane.store.protocol import (
    Compacted,
    Delete,
    Entry,
    KeyChange,
    Listing,
    Operation,
    Put,
    Store,
)

__all__ = ["Compacted", "Delete", "Entry", "KeyChange", "Listing", "Operation", "Put", "Store"]
