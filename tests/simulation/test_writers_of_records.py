"""Which process writes which records, as etcd sees it, while entitlements move and leaders fail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec
import pytest
from msgspec.structs import replace

from control_plane import running_shards
from control_plane.shards.ownership import OwnershipMap
from control_plane.store import etcd_pb2 as pb
from control_plane.store.records import JOBS, OWNERSHIPS, TASKS
from vm_lab.region import scenario
from vm_lab.region.etcd import DATA
from vm_lab.region.processes import role_of
from vm_lab.region.seed import SimulatedRegion
from vm_lab.region.story import read

STORY = """
5.0s release job:job0
6.0s resize job:job1 value=1.0
8.0s move-entitlement region:
12.0s move-entitlement region:
14.0s restart job:job4
20.0s power-off job:job1 60.0s
25.0s role-kill role:shard-1 10.0s
30.0s move-entitlement region:
36.0s move-entitlement region:
40.0s release job:job2
44.0s release job:job3
50.0s role-kill role:core 10.0s
70.0s move-entitlement region:
75.0s resize job:job3 value=0.5
80.0s release job:job1
90.0s release job:job5
"""
SHARED = {
    *("jobs", "tasks", "job-events", "allocations", "decisions", "entitlement-uses"),
    *("machines", "outcomes", "clock", "processes", "entitlement-releases"),
}
"""Keys of every shard, the core's included: its own entitlements, machines and elections."""
OF_THE_CORE = {"entitlements", "ownerships"}


class _Spec(msgspec.Struct):
    entitlement: str


class _Intent(msgspec.Struct):
    """The fields that are read from a stored job."""

    spec: _Spec


class _Owned(msgspec.Struct):
    """The fields that are read from the owner of an entitlement."""

    entitlement: str
    shard: int = 0


class Ledger:
    """Every written record, by the role whose process wrote it."""

    def __init__(self, region: SimulatedRegion) -> None:
        assert region.roles is not None
        self._roles = region.roles
        self._previous_hook, self._roles.etcd.on_commit = self._roles.etcd.on_commit, self.applied
        self.tables = defaultdict[str, set[str]](set)
        self.foreign: list[str] = []
        """Writes of a job by a process that does not own its entitlement."""
        self.jobs_written = defaultdict[str, int](int)
        self._owner: dict[str, int] = {}
        self._entitlement: dict[str, str] = {}

    def applied(self, sender: int, events: Sequence[pb.Event]) -> None:
        """Record one transaction, then pass it to the checkers."""
        for event in events:
            _, is_data, key = event.kv.key.partition(DATA)
            if sender and is_data:
                self._note(self._roles.by_number[sender].host.role, key.decode(), event.kv.value)
        self._previous_hook(sender, events)

    def _note(self, role: str, key: str, value: bytes) -> None:
        table, _, name = key.partition("/")
        self.tables[role].add(table)
        if key.startswith(OWNERSHIPS) and value:
            owned = msgspec.json.decode(value, type=_Owned)
            self._owner[owned.entitlement] = owned.shard
        elif key.startswith((JOBS, TASKS)):
            job = name.partition("/")[0]
            if key.startswith(JOBS) and value:
                self._entitlement[job] = msgspec.json.decode(value, type=_Intent).spec.entitlement
            self.jobs_written[role] += 1
            owner = role_of(self._owner.get(self._entitlement.get(job, ""), 0))
            if role != owner:
                self.foreign.append(f"{role} writes {key}, which is {owner}'s")


def run(story: str, settle_minutes: float) -> tuple[Ledger, SimulatedRegion]:
    """Return the writes in a region in which a story happens."""
    chosen = replace(
        scenario.load("roles-quiet"), minutes=3.0, settle_minutes=settle_minutes, faults=[]
    )
    region = SimulatedRegion(chosen, 1)
    ledger = Ledger(region)
    region.run(read(story))
    return ledger, region


@pytest.mark.behaviour("SH6", "SH16", "WH6")
def test_each_role_writes_only_its_records_under_any_leader() -> None:
    """The core writes quotas and owners; the owner of its entitlement writes a job."""
    ledger, region = run(STORY, 5.0)
    assert not region.checker.violations, [str(v) for v in region.checker.violations]
    assert region.figures["moves"] >= 3
    assert ledger.foreign == []
    assert all(ledger.jobs_written[role] for role in ("core", "shard-1", "shard-2"))
    assert OF_THE_CORE <= ledger.tables["core"] <= SHARED | OF_THE_CORE
    for role in ("shard-1", "shard-2"):
        assert {"jobs", "allocations"} <= ledger.tables[role] <= SHARED


@pytest.mark.behaviour("SH16")
def test_a_shard_that_writes_after_a_handover_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ledger of writes shows it."""

    def owner(ownership: OwnershipMap, number: int) -> Callable[[str], bool]:
        previous = set[str]()

        def owns(pool: str) -> bool:
            if ownership.shard_of(pool) == number:
                previous.add(pool)
            return pool in previous

        return owns

    monkeypatch.setattr(running_shards, "_owner", owner)
    first = "\n".join(STORY.splitlines()[:10])
    assert run(first, 0.2)[0].foreign
