"""A machine is free or in exactly one entitlement, after any operations and restarts."""

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from inventory import assign

from agent.api import Location
from control_plane.api.machine_commands import MarkDown, MarkUp, QuarantineMachine
from control_plane.api.machines import MachineRecord
from control_plane.broker.brokers import Brokers
from control_plane.broker.core.assignment import FREE
from control_plane.broker.holds import Take
from control_plane.broker.loans import Loans
from control_plane.runtime.runtime import Runtime
from control_plane.store import Store
from control_plane.store.memory import MemoryStore
from control_plane.store.sqlite import SqliteStore
from wire.errors import Conflict, NotFound

pytestmark = pytest.mark.behaviour("MO9")

NAMES = ["m1", "m2", "m3", "m4", "m5"]
MACHINE = st.sampled_from(NAMES)
SOME = st.lists(MACHINE, min_size=1, max_size=4, unique=True)
ENTITLEMENT = st.sampled_from(["a", "b"])
TRANSACTION = st.sampled_from(["t1", "t2"])
Work = Coroutine[Any, Any, object]


class BrokerModel(RuleBasedStateMachine):
    """The brokers of three data centers, compared with a dictionary of the expected owners."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.store = self.make_store()
        self.run(self.store.__aenter__())
        self.owner: dict[str, str] = {}
        self.holds: dict[str, tuple[str, str]] = {}
        self.donors: dict[str, str] = {}
        """Lent machine → entitlement that gets it back."""
        self.overdue: set[str] = set()
        self.load()
        self.run(self.brokers.add({name: _machine(name, i % 3) for i, name in enumerate(NAMES)}))
        self.owner = dict.fromkeys(NAMES, FREE)

    def make_store(self) -> Store:
        return MemoryStore()

    def run(self, work: Work) -> Any:
        return self.runner.run(work)

    def load(self) -> None:
        self.brokers = Brokers(self.store, Runtime(lambda: 0.0))
        self.loans = Loans(self.brokers, Runtime(lambda: 0.0))
        self.observed: dict[str, str] = {}
        self.brokers.listen(self.listen)
        self.run(self.brokers.load())

    def listen(self, name: str, before: MachineRecord | None, after: MachineRecord | None) -> None:
        assert (before.entitlement if before else None) == self.observed.get(name)
        if after is None:
            del self.observed[name]
        else:
            self.observed[name] = after.entitlement

    def succeeds(self, work: Work) -> bool:
        try:
            self.run(work)
        except (Conflict, NotFound):
            return False
        return True

    def revision(self, name: str) -> int:
        return self.brokers.table.revision(name)

    def takeable(self, name: str) -> bool:
        return self.owner[name] == FREE and name not in self.holds

    @rule(name=MACHINE, entitlement=ENTITLEMENT)
    def assign(self, name: str, entitlement: str) -> None:
        done = self.succeeds(assign(self.brokers.of(name), name, entitlement, "p"))
        assert done == self.takeable(name)
        if done:
            self.owner[name] = entitlement

    @rule(names=SOME, stale=st.booleans())
    def release(self, names: list[str], stale: bool) -> None:
        """Release machines of one data center, so that one transaction is enough."""
        home = self.brokers.of(names[0])
        names = [name for name in names if self.brokers.of(name) is home]
        revisions = {name: self.revision(name) - stale for name in names}
        done = self.succeeds(home.release_many(revisions))
        mine = all(self.owner[n] != FREE and not self.donors.get(n) for n in names)
        assert done == (mine and not stale)
        if done:
            self.owner |= dict.fromkeys(names, FREE)
            self.donors = {n: d for n, d in self.donors.items() if n not in names}
            self.overdue -= set(names)

    @rule(transaction=TRANSACTION, names=SOME, entitlement=ENTITLEMENT)
    def prepare(self, transaction: str, names: list[str], entitlement: str) -> None:
        if transaction in {t for t, _ in self.holds.values()}:
            return
        takes = dict.fromkeys(names, Take(entitlement, "p"))
        done = self.succeeds(self.brokers.prepare(transaction, takes))
        assert done == all(self.takeable(name) for name in names)
        if done:
            self.holds |= dict.fromkeys(names, (transaction, entitlement))

    @rule(transaction=TRANSACTION)
    def commit(self, transaction: str) -> None:
        mine = {n: e for n, (t, e) in self.holds.items() if t == transaction}
        done = self.run(self.brokers.commit(transaction))
        assert isinstance(done, list)
        assert {record.machine for record in done} == mine.keys()
        self.owner |= mine
        self.holds = {n: h for n, h in self.holds.items() if n not in mine}

    @rule(transaction=TRANSACTION)
    def abort(self, transaction: str) -> None:
        self.run(self.brokers.abort(transaction))
        self.holds = {n: h for n, h in self.holds.items() if h[0] != transaction}

    @rule(name=MACHINE, datacenter=st.integers(0, 2))
    def move(self, name: str, datacenter: int) -> None:
        here = self.brokers.of(name).datacenter == f"dc{datacenter}"
        done = self.succeeds(self.brokers.move(name, f"dc{datacenter}"))
        assert done == (here or self.takeable(name))

    @rule(name=MACHINE)
    def quarantine(self, name: str) -> None:
        if self.owner[name] != FREE:
            self.run(self.brokers.carry_out(name, QuarantineMachine(reason="test", until=0.0)))
            self.owner[name] = FREE
            self.donors.pop(name, None)
            self.overdue.discard(name)

    @rule(name=MACHINE, donor=st.sampled_from([FREE, "a", "b"]), borrower=ENTITLEMENT)
    def lend(self, name: str, donor: str, borrower: str) -> None:
        done = self.succeeds(self.loans.lend(name, borrower, "p", donor=donor, empty=True))
        mine = self.owner[name] == donor and name not in self.holds and name not in self.donors
        assert done == (mine and donor != borrower)
        if done:
            self.owner[name], self.donors[name] = borrower, donor

    @rule(name=MACHINE, empty=st.booleans(), revoked=st.booleans())
    def give_back(self, name: str, empty: bool, revoked: bool) -> None:
        if revoked:
            assert self.succeeds(self.loans.revoke([name], 0.0)) == (name in self.donors)
            self.overdue |= {name} & self.donors.keys()
        done = self.succeeds(self.loans.give_back(name, "p", empty=empty))
        assert done == (name in self.donors and (empty or name in self.overdue))
        if done:
            self.owner[name] = self.donors.pop(name)
            self.overdue.discard(name)

    @rule(name=MACHINE)
    def fail_and_return(self, name: str) -> None:
        self.run(self.brokers.carry_out(name, MarkDown(reason="test")))
        self.run(self.brokers.carry_out(name, MarkUp()))

    @rule()
    def restart(self) -> None:
        self.run(self.store.__aexit__(None, None, None))
        self.run(self.store.__aenter__())
        self.load()

    @invariant()
    def each_machine_is_where_it_belongs(self) -> None:
        owners = {record.machine: record.entitlement for record in self.brokers.table.records()}
        assert owners == self.owner == self.observed
        for entitlement in (FREE, "a", "b"):
            held = [record.machine for record in self.brokers.held(entitlement)]
            assert held == sorted(n for n, owner in self.owner.items() if owner == entitlement)

    @invariant()
    def a_loan_is_known_until_it_ends(self) -> None:
        lent = {r.machine: r.loan.donor for r in self.loans.lent() if r.loan is not None}
        assert lent == self.donors

    @invariant()
    def no_hold_is_lost_or_doubled(self) -> None:
        expected: dict[str, list[str]] = {}
        for name, (transaction, _) in sorted(self.holds.items()):
            expected.setdefault(transaction, []).append(name)
        assert self.brokers.in_doubt() == expected

    @invariant()
    def the_store_has_what_is_in_memory(self) -> None:
        keys = [e.key for e in self.run(self.store.list_prefix("machines/")).entries]
        assert sorted(key.rpartition("/")[2] for key in keys) == NAMES

    def teardown(self) -> None:
        self.run(self.store.__aexit__(None, None, None))
        self.runner.close()
        self.folder.cleanup()


class BrokerModelOnSqlite(BrokerModel):
    """The same model on the SQLite engine."""

    def make_store(self) -> Store:
        return SqliteStore(Path(self.folder.name))


def _machine(name: str, datacenter: int) -> MachineRecord:
    location = Location(datacenter=f"dc{datacenter}")
    return MachineRecord(machine=name, location=location, machine_type="web")


_SHORT = settings(max_examples=30, stateful_step_count=30, deadline=None)
BrokerModel.TestCase.settings = _SHORT
BrokerModelOnSqlite.TestCase.settings = settings(_SHORT, max_examples=8)
test_brokers_in_memory = BrokerModel.TestCase
test_brokers_on_sqlite = BrokerModelOnSqlite.TestCase
