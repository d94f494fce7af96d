"""How a process uses the elections of all roles (docs/adr/0154)."""

from __future__ import annotations

import asyncio

import pytest

from agent.api import Location
from agent.api.term import HEADER, OWNER_HEADER, read_term
from control_plane.api.machines import MachineRecord
from control_plane.api.ownership import EntitlementOwner
from control_plane.runtime.following import Following
from control_plane.shards.ownership import OwnershipMap
from control_plane.shards.processes import OwnRole, RoleLeaders
from control_plane.store.memory import MemoryStore
from wire.errors import Busy, Unreachable

CORE = OwnRole(name="core", shards=3, url="https://core:7440")
FIRST = OwnRole(name="shard-1", shard=1, shards=3, url="https://one:7441")


async def elected(store: MemoryStore, role: OwnRole, epoch: int) -> None:
    """Write the records that an election writes."""
    await store.txn({}, role.election_records(epoch))


@pytest.mark.behaviour("SH3")
async def test_the_newest_epoch_of_any_role_counts_and_every_process_sends_it() -> None:
    """A machine that passes to another shard never receives a lower number."""
    async with MemoryStore() as store:
        await elected(store, CORE, 4)
        await elected(store, FIRST, 7)
        for role in (CORE, FIRST):
            leaders = RoleLeaders(store, role)
            await leaders.load()
            ownership = OwnershipMap(store)
            ownership.epoch = leaders.epoch
            await ownership.load()
            assert ownership.number() == 7


@pytest.mark.behaviour("AV2")
async def test_a_replaced_leader_sends_no_number_of_its_successor() -> None:
    """The leader learns of its successor before it learns of later epochs, and ends."""
    async with MemoryStore() as store:
        await elected(store, CORE, 1)
        await elected(store, FIRST, 2)
        leaders = RoleLeaders(store, FIRST)
        following = Following(store, [leaders.table])
        await leaders.load()
        running = asyncio.create_task(following.run())
        await elected(store, CORE, 3)
        assert await following.wait_reached(store.revision(), 5.0)
        assert leaders.epoch() == 3
        successor = OwnRole(name="shard-1", shard=1, shards=3, url="https://two:7441")
        await elected(store, successor, 4)
        await elected(store, CORE, 5)
        assert await following.wait_reached(store.revision(), 5.0)
        with pytest.raises(Busy, match="another process leads shard-1"):
            await asyncio.wait_for(leaders.wait_replaced(), 5.0)
        assert leaders.epoch() == 3
        running.cancel()


async def test_a_shard_without_a_core_that_fits_does_not_start() -> None:
    async with MemoryStore() as store:
        with pytest.raises(Busy, match="--role core"):
            await RoleLeaders(store, FIRST).load()
        await elected(store, OwnRole(name="all", shards=3), 1)
        with pytest.raises(Busy, match="--role core"):
            await RoleLeaders(store, FIRST).load()
        await elected(store, OwnRole(name="core", shards=1), 2)
        await RoleLeaders(store, FIRST).load()


@pytest.mark.behaviour("SH2")
async def test_shards_are_known_once_their_processes_have_led() -> None:
    """A new shard is known once its election is followed. Numbers may have gaps."""
    async with MemoryStore() as store:
        await elected(store, CORE, 1)
        leaders = RoleLeaders(store, CORE)
        following = Following(store, [leaders.table])
        await leaders.load()
        assert leaders.shards() == []
        running = asyncio.create_task(following.run())
        await elected(store, OwnRole(name="shard-7", shard=7, url="https://seven:7441"), 2)
        assert await following.wait_reached(store.revision(), 5.0)
        assert leaders.shards() == [7]
        assert (await leaders.has_led(7), await leaders.has_led(6)) == (True, False)
        assert leaders.own_record() is not None
        running.cancel()


async def test_hosts_receive_one_term_of_the_store_from_all_processes() -> None:
    """The term is the one of the core, as far as each process has followed it (docs/adr/0111)."""
    async with MemoryStore() as store:
        await elected(store, CORE, 1)
        terms = []
        for role in (CORE, FIRST):
            leaders = RoleLeaders(store, role)
            leaders.following = Following(store, [leaders.table])
            await leaders.load()
            terms.append(read_term(leaders.headers()[HEADER]))
        assert terms[0] == terms[1]
        assert terms[0] is not None
        assert terms[0].began == terms[0].now == store.revision()


@pytest.mark.behaviour("AV7")
async def test_a_shard_that_never_led_is_away_and_another_ones_machine_is_not_commanded() -> None:
    """The caller may retry after the error. Hosts refuse changes with number 0."""
    async with MemoryStore() as store:
        await elected(store, CORE, 1)
        leaders = RoleLeaders(store, CORE)
        await leaders.load()
        with pytest.raises(Unreachable, match="shard 2 is unavailable") as refusal:
            leaders.url_of(2)
        assert refusal.value.retryable
        ownership = OwnershipMap(store)
        ownership.is_ours, ownership.epoch = CORE.runs, leaders.epoch
        await ownership.load()
        async with ownership.table.lock("web"):
            await ownership.table.commit("web", EntitlementOwner(entitlement="web", shard=2))
        machine = MachineRecord(
            machine="m1", location=Location(), machine_type="small", entitlement="web"
        )
        ownership.find_machine = {"m1": machine}.get
        assert ownership.headers("m1") == {OWNER_HEADER: "web/0"}


@pytest.mark.behaviour("SH4")
async def test_a_withdrawn_move_cannot_be_released() -> None:
    """A late release by the old shard is refused."""
    async with MemoryStore() as store:
        core, shard = OwnershipMap(store), OwnershipMap(store)
        await core.announce("web", 2)
        await shard.load()
        assert shard.moves_to("web") == 2
        await core.announce("web", None)
        with pytest.raises(Exception, match="ownerships/web"):
            await shard.release("web")
        assert not await core.is_released("web")
        await core.announce("web", 1)
        await shard.table.list_again()
        await shard.release("web")
        assert await core.is_released("web")
        await core.move("web", 1)
        assert not await core.is_released("web")
        assert (core.shard_of("web"), core.moves_to("web")) == (1, None)
