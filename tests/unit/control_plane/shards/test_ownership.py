"""The number of the term that agents compare: it rises with each new leader and each move."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agent.api import Location
from agent.api.term import OWNER_HEADER
from control_plane.api.machines import MachineRecord
from control_plane.api.ownership import EntitlementOwner
from control_plane.shards.ownership import OwnershipMap
from control_plane.store.memory import MemoryStore

pytestmark = pytest.mark.behaviour("SH3")


async def test_a_store_without_a_map_continues_from_its_epochs() -> None:
    """Numbers that an earlier release sent to hosts are lower than all numbers sent now."""
    store = MemoryStore()
    for epoch in (1, 2):
        async with store:
            ownership = OwnershipMap(store)
            await ownership.load()
            assert (ownership.number(), ownership.shard_of("web")) == (epoch, 0)


async def test_a_move_counts_over_restarts_and_longer_than_its_entitlement() -> None:
    store = MemoryStore()
    async with store:
        ownership = OwnershipMap(store)
        await ownership.load()
        async with ownership.table.lock("web"):
            await ownership.table.commit(
                "web", EntitlementOwner(entitlement="web", shard=2, moved=5)
            )
    async with store:
        ownership = OwnershipMap(store)
        await ownership.load()
        assert (ownership.number(), ownership.shard_of("web")) == (2 + 5, 2)


async def test_a_request_has_the_present_owner_of_the_machine() -> None:
    free = MachineRecord(machine="m1", location=Location(), machine_type="small")
    store = MemoryStore()
    async with store:
        ownership = OwnershipMap(store)
        await ownership.load()
        ownership.find_machine = {"m1": free}.get
        assert ownership.headers("m1") == {}, "a free machine has no owner"
        taken = replace(free, entitlement="web")
        ownership.find_machine = {"m1": taken}.get
        assert ownership.headers("m1") == {OWNER_HEADER: "web/1"}
        assert ownership.headers("gone") == {}
