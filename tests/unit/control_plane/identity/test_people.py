"""Groups and operators: they are stored, and in force from the next request on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from control_plane.api.people import GroupSpec
from control_plane.identity.people import People
from control_plane.runtime.runtime import Runtime
from control_plane.store import Put
from control_plane.store.memory import MemoryStore
from tests.faulty_store import LOST, MADE, UNANSWERED, FaultyStore, Outcome
from wire.errors import ConfigError, Conflict, InvalidInput, NotFound, UnknownOutcome


async def opened(store: MemoryStore, *operators: str) -> People:
    people = People(store, Runtime(), operators, approvers=["bob"])
    await people.load()
    return people


def on_a_store(work: Callable[[MemoryStore], Awaitable[None]]) -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            await work(store)

    asyncio.run(main())


def test_groups_and_grants_survive_a_restart() -> None:
    async def work(store: MemoryStore) -> None:
        people = await opened(store)
        await people.put_group("sre", GroupSpec(members=["sue", "ann", "ann"]))
        await people.grant("group:sre", "local:0")
        again = await opened(store)
        assert again.user("sue").is_operator
        assert again.user("ann").groups == {"sre"}
        assert not again.user("bob").is_operator
        assert again.user("bob").is_approver
        assert [g.by for g in again.operators().granted] == ["local:0"]

    on_a_store(work)


def test_a_user_that_leaves_the_group_is_no_operator() -> None:
    async def work(store: MemoryStore) -> None:
        people = await opened(store, "group:sre", "user:root")
        await people.put_group("sre", GroupSpec(members=["sue"]))
        assert people.user("sue").is_operator
        await people.put_group("sre", GroupSpec(members=["tom"]))
        assert not people.user("sue").is_operator
        await people.delete_group("sre")
        assert not people.user("tom").is_operator
        assert people.user("root").is_operator

    on_a_store(work)


def test_only_the_configuration_revokes_rights_that_it_gives() -> None:
    async def work(store: MemoryStore) -> None:
        people = await opened(store, "user:root")
        with pytest.raises(Conflict, match="an operator by the configuration"):
            await people.revoke("user:root")
        with pytest.raises(NotFound):
            await people.revoke("user:unknown")

    on_a_store(work)


@pytest.mark.parametrize(
    "principal", ["", "ann", "user:", "user:Ann", "role:x", "user:ann\n", "group:a b"]
)
def test_only_a_user_or_group_becomes_operator(principal: str) -> None:
    async def work(store: MemoryStore) -> None:
        people = await opened(store)
        with pytest.raises(InvalidInput, match="expected user:NAME or group:NAME"):
            await people.grant(principal, "local:0")
        assert people.operators().granted == []

    on_a_store(work)


def test_a_group_that_there_is_not_becomes_no_operator() -> None:
    async def work(store: MemoryStore) -> None:
        people = await opened(store)
        with pytest.raises(NotFound, match="no group 'ghosts'"):
            await people.grant("group:ghosts", "local:0")
        with pytest.raises(InvalidInput, match="expected 1 to 63"):
            await people.put_group("Bad Name", GroupSpec(members=[]))

    on_a_store(work)


@pytest.mark.behaviour("BUG-CP149")
@pytest.mark.parametrize("outcome", [UNANSWERED, LOST], ids=["made", "lost"])
def test_a_user_can_be_revoked_after_a_write_without_an_answer(outcome: Outcome) -> None:
    """Formerly each further attempt was a conflict, until a restart."""

    async def work(inner: MemoryStore) -> None:
        outcomes = [outcome, MADE]
        people = People(FaultyStore(inner, lambda _: outcomes.pop(0)), Runtime())
        with pytest.raises(UnknownOutcome):
            await people.revoke_identity("user", "ann", "local:0")
        await people.revoke_identity("user", "ann", "local:0")
        assert people.is_void("spiffe://twine/user/ann", 0.0)
        assert [r.name for r in (await opened(inner)).revocations()] == ["ann"]

    on_a_store(work)


@pytest.mark.behaviour("BUG-CP149")
def test_a_change_is_compared_with_what_an_unanswered_write_stored() -> None:
    async def work(inner: MemoryStore) -> None:
        outcomes = [MADE, UNANSWERED, MADE]
        people = People(FaultyStore(inner, lambda _: outcomes.pop(0)), Runtime())
        await people.put_group("sre", GroupSpec(members=["sue"]))
        with pytest.raises(UnknownOutcome):
            await people.put_group("sre", GroupSpec(members=["tom"]))
        await people.put_group("sre", GroupSpec(members=["sue"]))
        assert (await opened(inner)).groups() == people.groups()

    on_a_store(work)


def test_another_writer_is_not_overwritten() -> None:
    async def work(store: MemoryStore) -> None:
        people = await opened(store)
        await (await opened(store)).put_group("web", GroupSpec(members=["bob"]))
        with pytest.raises(Conflict):
            await people.put_group("web", GroupSpec(members=["ann"]))
        assert (await opened(store)).user("bob").groups == {"web"}

    on_a_store(work)


@pytest.mark.parametrize("value", [b"{", b'{"schema":2,"name":"web"}'])
def test_a_record_that_cannot_be_read_stops_the_start(value: bytes) -> None:
    async def work(store: MemoryStore) -> None:
        await store.txn({}, [Put("people/groups/web", value)])
        with pytest.raises(ConfigError, match="cannot read people/groups/web"):
            await opened(store)

    on_a_store(work)
