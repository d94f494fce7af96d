"""The keys of machines in a store, `machines/<data center>/<name>`, and their migration."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from control_plane.api.machines import MachineRecord
from control_plane.runtime.table import PAGE, PART
from control_plane.store import Delete, Entry, Operation, Put, Store
from control_plane.store.protocol import LAST
from control_plane.store.records import MACHINES, decode

log = logging.getLogger(__name__)


def prefix_of(datacenter: str) -> str:
    """Return the prefix of the keys of a data center's machines."""
    return f"{MACHINES}{datacenter}/"


async def find_datacenters(store: Store) -> set[str]:
    """Return the data centers with machines in a store, without reading the machines.

    Machines of an earlier release, directly below `machines/`, are moved first.
    """
    found: set[str] = set()
    after = ""
    while entries := (await store.list_prefix(MACHINES, after, PAGE)).entries:
        old = [entry for entry in entries if not datacenter_of(entry.key)]
        for first in range(0, len(old), PART // 2):
            found |= await _migrate(store, old[first : first + PART // 2])
        found |= {datacenter_of(entry.key) for entry in entries}
        after = entries[-1].key
        if datacenter := datacenter_of(after):  # its broker reads the rest of this data center
            after = prefix_of(datacenter) + LAST
    found.discard("")
    return found


async def _migrate(store: Store, entries: Sequence[Entry]) -> set[str]:
    """Move machines to the keys of their data centers, and return these data centers."""
    compare: dict[str, int] = {}
    operations: list[Operation] = []
    found = set()
    for entry in entries:
        record = decode(entry.value, MachineRecord, entry.key)
        datacenter = record.location.datacenter
        key = prefix_of(datacenter) + record.machine
        found.add(datacenter)
        compare |= {entry.key: entry.revision, key: 0}
        operations += [Delete(entry.key), Put(key, entry.value)]
    await store.txn(compare, operations)
    log.info("machines moved to their data centers' keys", extra={"machines": len(entries)})
    return found


def datacenter_of(key: str) -> str:
    """Return the data center in a machine's key.

    Empty for keys of earlier releases, which have none, and for keys that are not of machines.
    """
    if not key.startswith(MACHINES):
        return ""
    datacenter, slash, _ = key.removeprefix(MACHINES).partition("/")
    return datacenter if slash else ""
