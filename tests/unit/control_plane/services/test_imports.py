"""A list of machines is imported completely or not at all, despite crashes and failures."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from faulty_store import MADE, REFUSED, UNANSWERED, FaultyStore, Outcome
from inventory import a_machine, assign, loaded

from agent.api import Location
from control_plane.api.inventory import InventoryMachine
from control_plane.api.machine_commands import QuarantineMachine
from control_plane.api.machines import Hardware
from control_plane.broker.brokers import Brokers
from control_plane.runtime.table import PART
from control_plane.store import Operation, Put, Store
from control_plane.store.memory import MemoryStore
from control_plane.store.sqlite import SqliteStore
from wire.errors import Busy, Conflict

NEW = 2 * PART + 10
"""New machines: several transactions in each of two data centers."""


class Killed(BaseException):
    """The process ended."""


def killed_after(transactions: int) -> Callable[[Sequence[Operation]], Outcome]:
    left = transactions

    def outcome(_: Sequence[Operation]) -> Outcome:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return MADE

    return outcome


def listed(name: str, datacenter: str, cluster: str = "c1") -> InventoryMachine:
    return InventoryMachine(
        machine=name,
        location=Location(datacenter=datacenter),
        machine_type="web",
        hardware=Hardware(sku="s1"),
        cluster=cluster,
    )


def the_list() -> list[InventoryMachine]:
    """A list of machines that stay and change, move, or are new in both data centers."""
    new = [listed(f"n{i:03}", f"dc{1 + i % 2}") for i in range(NEW)]
    return [listed("stays", "dc1"), listed("moves", "dc2"), *new]


class Meanwhile(FaultyStore):
    """Runs a callback once a transaction on keys with a prefix is made."""

    def __init__(self, inner: Store, prefix: str) -> None:
        super().__init__(inner)
        self._prefix = prefix
        self.first: Callable[[], Awaitable[None]] | None = None

    async def txn(self, compare: Mapping[str, int], operations: Sequence[Operation]) -> int:
        revision = await super().txn(compare, operations)
        if self.first is not None and operations[0].key.startswith(self._prefix):
            happens, self.first = self.first, None
            await happens()
        return revision


Engines = Callable[[], tuple[Store, Store]]


@pytest.fixture(params=["memory", "sqlite"])
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Engines]:
    """Return a function that creates a pair of stores that can be reopened."""
    made = 0

    def pair() -> Engines:
        nonlocal made
        made += 1
        folders = [tmp_path / f"{made}-{name}" for name in ("main", "dc2")]
        if request.param == "sqlite":
            return lambda: tuple(SqliteStore(folder, strict=True) for folder in folders)
        kept = (MemoryStore(strict=True), MemoryStore(strict=True))
        return lambda: kept

    return pair


@asynccontextmanager
async def started(engines: Engines, outcome=lambda _: MADE) -> AsyncIterator[Brokers]:
    """Open the stores and load the brokers, as a process does; `outcome` applies after that."""
    main, dc2 = (FaultyStore(store) for store in engines())
    async with main, dc2:
        brokers = await loaded(main, {"dc2": dc2})
        main.outcome = dc2.outcome = outcome
        yield brokers


async def set_up(engines: Engines) -> None:
    async with started(engines) as brokers:
        await brokers.add({name: a_machine(name) for name in ("stays", "moves", "other")})


async def leftovers(engines: Engines) -> list[str]:
    found = []
    for store in engines():
        async with store:
            for prefix in ("imports/", "import-decisions/", "machine-moves/"):
                found += [entry.key for entry in (await store.list_prefix(prefix)).entries]
    return found


async def taken(engines: Engines) -> bool:
    """Return whether the list is in force after a start; assert that it is complete or absent."""
    async with started(engines) as brokers:
        names = set(brokers.table)
        known = {name: brokers.table.get(name) for name in ("stays", "moves")}
    assert await leftovers(engines) == []
    if names == {"stays", "moves", "other"}:
        assert all(record.hardware is None for record in known.values())
        assert known["moves"].location.datacenter == "dc1"
        return False
    assert names == {"stays", "moves", "other"} | {f"n{i:03}" for i in range(NEW)}
    assert {record.cluster for record in known.values()} == {"c1"}
    assert known["moves"].location.datacenter == "dc2"
    return True


@pytest.mark.behaviour("BUG-CP23")
async def test_a_list_is_taken_whole_or_not_at_all_wherever_the_process_ends(engines) -> None:
    """Half of a list stayed if the process ended between two transactions."""
    outcomes = []
    while True:
        stores = engines()
        await set_up(stores)
        try:
            async with started(stores, killed_after(len(outcomes))) as brokers:
                await brokers.import_machines(the_list())
        except Killed:
            outcomes.append(await taken(stores))
        else:
            break
    assert await taken(stores)
    assert outcomes == sorted(outcomes), "nothing of it before the decision, all of it after"
    assert {True, False} <= set(outcomes)
    assert len(outcomes) > NEW // PART


@pytest.mark.behaviour("BUG-CP23")
async def test_a_start_that_ends_while_it_finishes_a_list_is_followed_by_another(engines) -> None:
    """The first start that does not crash completes a decided list."""
    stores, transactions = engines(), 0
    await set_up(stores)
    with pytest.raises(Killed):
        async with started(stores, killed_after(4)) as brokers:
            await brokers.import_machines(the_list())
    while True:
        main, dc2 = (FaultyStore(store, killed_after(transactions)) for store in stores())
        try:
            async with main, dc2:
                await loaded(main, {"dc2": dc2})
        except Killed:
            transactions += 1
        else:
            break
    assert transactions >= 2
    assert await taken(stores)


@pytest.mark.behaviour("BUG-CP23")
async def test_a_failure_before_the_decision_changes_nothing(engines) -> None:
    """Writes before the failure stayed."""

    def refuses_decisions(operations: Sequence[Operation]) -> Outcome:
        decides = any(o.key.startswith("import-decisions/") for o in operations)
        return REFUSED if decides and isinstance(operations[0], Put) else MADE

    stores = engines()
    await set_up(stores)
    async with started(stores, refuses_decisions) as brokers:
        with pytest.raises(Busy):
            await brokers.import_machines(the_list())
        assert set(brokers.table) == {"stays", "moves", "other"}
        await brokers.add({"more": a_machine("more")})
        await brokers.carry_out("more", QuarantineMachine(reason="", until=0.0))
    assert await leftovers(stores) == []


async def test_a_decision_with_a_lost_answer_is_read_back(engines) -> None:
    """The decision counts if it was made."""

    def loses_answers(operations: Sequence[Operation]) -> Outcome:
        return UNANSWERED if operations[0].key.startswith("import-decisions/") else MADE

    stores = engines()
    await set_up(stores)
    async with started(stores, loses_answers) as brokers:
        await brokers.import_machines(the_list())
    assert await taken(stores)


@pytest.mark.behaviour("BUG-CP23")
async def test_a_list_with_failing_stores_after_the_decision_is_finished_later(engines) -> None:
    """The answer reports it; other data centers do not wait."""
    fails = True

    def outcome(operations: Sequence[Operation]) -> Outcome:
        return REFUSED if fails and operations[0].key.startswith("machines/dc2/") else MADE

    stores = engines()
    await set_up(stores)
    async with started(stores, outcome) as brokers:
        result = await brokers.import_machines(the_list())
        assert (result.added, result.updated, result.pending) == (NEW, 2, True)
        assert "n000" in list(brokers.table)
        assert "n001" not in list(brokers.table)
        with pytest.raises(Busy):
            await brokers.remove("n000")
        fails = False
        finishing = asyncio.create_task(brokers.finish_imports())
        while "n001" not in list(brokers.table) or brokers.of("moves").datacenter != "dc2":
            await asyncio.sleep(0)
        assert not (await brokers.import_machines(the_list())).pending
        finishing.cancel()
    assert await taken(stores)


@pytest.mark.behaviour("BUG-CP23")
async def test_a_machine_taken_before_the_decision_blocks_the_list(engines) -> None:
    """Writes made before the conflict was detected stayed."""
    stores = engines()
    await set_up(stores)
    main = Meanwhile(stores()[0], "imports/")
    async with main:
        brokers = await loaded(main)

        async def taking() -> None:
            await assign(brokers.of("moves"), "moves", "online", "web")

        main.first = taking
        with pytest.raises(Conflict, match="moves is in entitlement 'online'"):
            await brokers.import_machines(the_list())
        assert set(brokers.table) == {"stays", "moves", "other"}
        assert brokers.table.get("stays").hardware is None
        await loaded(main)
    assert await leftovers(stores) == []


@pytest.mark.behaviour("BUG-CP23")
async def test_a_machine_that_is_taken_after_the_decision_stays_in_its_place(engines) -> None:
    """Placements rely on its place. All other fields follow the list."""
    fails = True

    def outcome(operations: Sequence[Operation]) -> Outcome:
        return REFUSED if fails and operations[0].key.startswith("machines/dc2/") else MADE

    stores = engines()
    await set_up(stores)
    async with started(stores, outcome) as brokers:
        assert (await brokers.import_machines(the_list())).pending
        await assign(brokers.of("moves"), "moves", "online", "web")
        fails = False
        with pytest.raises(Conflict, match="moves is in entitlement 'online'"):
            await brokers.import_machines(the_list())
        record = brokers.table.get("moves")
        assert (record.location.datacenter, record.cluster) == ("dc1", "c1")
        assert len(brokers.table) == NEW + 3
    assert await leftovers(stores) == []
