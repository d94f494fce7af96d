"""Verifies the separate stores of data centers (RB9) before the control plane starts.

A control plane that lacks the records of machines considers their tasks lost and starts them
elsewhere, a second time. So each store of a data center names its main store, and the main store
has a note of each. If these and the configuration disagree, the control plane does not start. Then
a disk is not mounted, a line was removed, folders were swapped, or machines are still in the main
store.

Order of writes: the store gets its owner, then the main store its note, then machines come.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from control_plane.api.broker_stores import BrokerStoreNote, BrokerStoreOwner
from control_plane.broker.keys import find_datacenters
from control_plane.store import Delete, Put, Store
from control_plane.store.records import decode, encode
from wire.errors import ConfigError, FieldError, NotFound

log = logging.getLogger(__name__)
_IDENTITY = "store-identity"
"""In the main store: a random name, so that no control plane uses another's store."""
NOTES = "broker-stores/"
"""In the main store: one note per data center."""
_OWNER = "broker-store-owner"
"""In the store of a data center."""


@dataclass(frozen=True, slots=True)
class OwnStore:
    """The open store of one data center."""

    store: Store
    folder: str
    """Its path, for messages."""


async def claim(main: Store, own: Mapping[str, OwnStore]) -> None:
    """Claim these stores for the machines of their data centers, or raise all errors.

    All are checked before anything is written. `ConfigError` if the control plane would not find
    all the machines that it has.
    """
    notes = await _notes(main)
    if not own and not notes:
        return
    known = await main.get(_IDENTITY)
    identity = known.value.decode() if known is not None else ""
    in_main = await find_datacenters(main)
    errors = [
        _error(
            name,
            f"is missing: the machines of {name} are in a separate store, last at "
            f"{notes[name].folder}",
        )
        for name in sorted(notes.keys() - own.keys())
    ]
    for name, found in sorted(own.items()):
        if name in in_main:
            reason = (
                f"there are machines of {name} in the main store: remove this line, or remove "
                "these machines first (twinectl machine delete)"
            )
        else:
            reason = await _why_unusable(name, found, identity, notes.get(name))
        if reason:
            errors.append(_error(name, reason))
    if errors:
        listed = "; ".join(f"{error.field} {error.reason}" for error in errors)
        raise ConfigError(
            f"cannot use the stores of data centers: {listed}",
            hint="machines in a missing store would lose their tasks, so the control plane does "
            "not start; for a store that is lost: twine-control-plane forget-store",
            errors=tuple(errors),
        )
    if not identity:
        identity = secrets.token_hex(16)
        await main.txn({_IDENTITY: 0}, [Put(_IDENTITY, identity.encode())])
    for name, found in own.items():
        await _claim_store(main, name, found, identity, notes.get(name))


async def forget(main: Store, datacenter: str) -> BrokerStoreNote:
    """Forget the store of a data center; return its note."""
    entry = await main.get(NOTES + datacenter)
    if entry is None:
        raise NotFound(f"the main store has no record of a store for {datacenter!r}")
    note = decode(entry.value, BrokerStoreNote, entry.key)
    await main.txn({entry.key: entry.revision}, [Delete(entry.key)])
    log.info("store of a data center forgotten", extra={"datacenter": datacenter})
    return note


async def _why_unusable(
    name: str, found: OwnStore, identity: str, note: BrokerStoreNote | None
) -> str:
    """Return why a store cannot belong to a data center; empty: it does, or will."""
    entry = await found.store.get(_OWNER)
    if entry is None:
        if note is not None:
            return (
                f"is empty at {found.folder}, and the machines of {name} were in a store, last"
                f" at {note.folder}: is its disk mounted?"
            )
        if (await found.store.list_prefix("", "", 1)).entries:
            return f"is not a store of a data center: {found.folder} holds something else"
        return ""
    owner = decode(entry.value, BrokerStoreOwner, entry.key)
    if owner.owner != identity:
        return f"belongs to another control plane, or to an earlier one: {found.folder}"
    if owner.datacenter != name:
        return f"is the store of {owner.datacenter}: {found.folder}"
    return ""


async def _claim_store(
    main: Store, name: str, found: OwnStore, identity: str, note: BrokerStoreNote | None
) -> None:
    if await found.store.get(_OWNER) is None:
        owner = BrokerStoreOwner(datacenter=name, owner=identity)
        await found.store.txn({_OWNER: 0}, [Put(_OWNER, encode(owner))])
    wanted = BrokerStoreNote(datacenter=name, folder=found.folder)
    if note != wanted:
        await main.txn({}, [Put(NOTES + name, encode(wanted))])


async def _notes(main: Store) -> dict[str, BrokerStoreNote]:
    entries = (await main.list_prefix(NOTES)).entries
    notes = [decode(entry.value, BrokerStoreNote, entry.key) for entry in entries]
    return {note.datacenter: note for note in notes}


def _error(name: str, reason: str) -> FieldError:
    return FieldError(field=f"broker_stores.{name}", reason=reason)
