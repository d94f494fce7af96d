"""Every kind of record that a process reads at its start can be set aside."""

from __future__ import annotations

import pytest

from control_plane.api.broker_stores import BrokerStoreNote, BrokerStoreOwner
from control_plane.api.jobs import JobRecord
from control_plane.api.rebalancing import RebalanceRecord
from control_plane.api.restored import Restored
from control_plane.rebalancer.records import RebalanceRecords
from control_plane.runtime.anchor import Anchor
from control_plane.runtime.runtime import Runtime
from control_plane.store import Put
from control_plane.store.memory import MemoryStore
from control_plane.store.quarantine import quarantined, set_all_aside
from control_plane.store.records import (
    CLOCK,
    FREED,
    KINDS,
    PROMISES,
    REBALANCE,
    SCHEMAS,
    USE_HISTORIES,
    WORK,
    DamagedRecord,
    encode,
)

pytestmark = pytest.mark.behaviour("BUG-CP117")

DAMAGED = b"\x00 no record at all"


def test_only_records_whose_loss_is_worse_than_a_failed_start_stay() -> None:
    """`JobRecord` is read from `jobs/`; the others say which store this is, and how old."""
    left = set(SCHEMAS) - set(KINDS.values())
    assert left == {JobRecord, Restored, BrokerStoreNote, BrokerStoreOwner}


@pytest.mark.parametrize("prefix", [USE_HISTORIES, PROMISES, FREED, REBALANCE, WORK])
async def test_a_damaged_record_of_a_service_is_set_aside(prefix: str) -> None:
    async with MemoryStore() as store:
        await store.txn({}, [Put(f"{prefix}one", DAMAGED)])
        assert [damage.key for damage in await set_all_aside(store)] == [f"{prefix}one"]
        assert await store.get(f"{prefix}one") is None
        assert await quarantined(store) == [f"{prefix}one"]


async def test_moves_stay_paused_when_the_record_of_their_pause_is_damaged() -> None:
    async with MemoryStore() as store:
        paused = RebalanceRecord(paused_by="ann", paused_why="holidays")
        await store.txn({}, [Put(f"{REBALANCE}state", encode(paused)[:-2])])
        with pytest.raises(DamagedRecord):
            await RebalanceRecords(store).load()
        await set_all_aside(store)
        records = RebalanceRecords(store)
        await records.load()
        assert "damaged" in records.state.paused_why
        await records.change(lambda _: RebalanceRecord(plans=1))
        again = RebalanceRecords(store)
        await again.load()
        assert again.state == RebalanceRecord(plans=1)


@pytest.mark.behaviour("BUG-CP118")
async def test_a_damaged_date_is_replaced_and_keeps_no_process_from_starting() -> None:
    """The conveyor, the autoscaler and Optimus have no records that are set aside for it."""
    async with MemoryStore() as store:
        await store.txn({}, [Put(f"{CLOCK}/boot", DAMAGED)])
        anchor = Anchor(store, Runtime(), "boot")
        await anchor.load()
        await anchor._store_date()
        entry = await store.get(f"{CLOCK}/boot")
        assert entry is not None
        await Anchor(store, Runtime(), "boot").load()
        assert b"booted_at" in entry.value
