"""Roles in replicas and shards in processes, on a modelled etcd: leaders fail among other faults.

Leases, elections, followers and moves are the product's; etcd is a model with the same messages.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from pytest_mock import MockerFixture

from control_plane import running_shards
from control_plane.agents.region import Region
from control_plane.allocator.core import demand
from control_plane.allocator.quotas import Quotas
from control_plane.portal.core import pools
from control_plane.portal.core.pools import Quota
from control_plane.shard_processes import ShardProcesses
from control_plane.shards.core import scopes
from control_plane.shards.ownership import OwnershipMap
from control_plane.store.etcd import EtcdStore
from vm_lab.region import scenario
from vm_lab.region.results import as_story
from vm_lab.region.run import Job, run_many, run_one
from vm_lab.region.seed import SimulatedRegion, run_seed
from vm_lab.region.story import draw, read

MOST = 200
SEEDS = 4
"""Number of seeds in CI; `make role-seeds` has more."""
PUT = re.compile(r" put (\S+) generation")
PROCESSES = min(2, os.cpu_count() or 1)


def found(name: str, rules: set[str]) -> int:
    """Return the first seed of a scenario that breaks one of the rules."""
    chosen = scenario.load(name)
    for seed in range(1, MOST + 1):
        if rules & {violation.rule for violation in run_one(Job(chosen, seed)).violations}:
            return seed
    raise AssertionError(f"none of {MOST} seeds of {name} breaks {' or '.join(sorted(rules))}")


@pytest.mark.behaviour("AV1", "AV2", "AV7", "AV16", "SH1", "SH3", "SH4")
def test_no_rule_is_broken_by_leaders_that_fail_in_the_middle_of_everything() -> None:
    """The region has a core of three processes and two shards of two processes each.

    Leaders are killed, stopped and cut off, in one or both directions, from all or from etcd alone,
    at their writes and between them. Meanwhile entitlements move, versions are released, and
    machines fail.
    """
    roles = scenario.load("roles")
    outcomes = run_many([Job(roles, seed) for seed in range(1, SEEDS + 1)], PROCESSES)
    broken = [outcome for outcome in outcomes if not outcome.ok]
    assert not broken, "\n".join(as_story(outcome) for outcome in broken)
    assert all(outcome.figures["take-overs"] >= 5 for outcome in outcomes)
    assert all(outcome.figures["moves"] >= 5 for outcome in outcomes)


@pytest.mark.behaviour("AV2", "SH3")
@pytest.mark.parametrize("seed", [1, 2])
def test_no_task_restarts_because_another_process_leads(seed: int) -> None:
    """Each task gets one start command, with every leader and every owner."""
    chosen = scenario.load("roles-quiet")
    region = SimulatedRegion(chosen, seed)
    region.run(list(draw(chosen, seed)))
    lines = list(region.history.lines())
    puts = Counter(match[1] for line in lines if (match := PUT.search(line)))
    assert not region.checker.violations, [str(v) for v in region.checker.violations]
    assert region.figures["take-overs"] >= 4
    assert region.figures["moves"] >= 4
    assert puts
    assert set(puts.values()) == {1}, puts


@pytest.mark.behaviour("AV3", "AV16")
def test_all_processes_down_restart_no_task() -> None:
    """Every leader and every standby is killed at once; tasks run on and are adopted."""
    chosen = replace(scenario.load("roles-quiet"), minutes=4.0, faults=[])
    roles = ("core", "shard-1", "shard-2")
    story = [f"10.0s role-kill role:{role} 60.0s" for role in roles]
    story += [f"10.{n}s role-kill standby:{role} 60.0s" for n in (1, 2) for role in roles]
    region = SimulatedRegion(chosen, 1)
    region.run(read("\n".join(story)))
    puts = Counter(match[1] for line in region.history.lines() if (match := PUT.search(line)))
    assert not region.checker.violations, [str(v) for v in region.checker.violations]
    assert region.plane.lives >= 2 * len(region.roles.hosts if region.roles else ())
    assert puts
    assert set(puts.values()) == {1}, puts


@pytest.mark.behaviour("AV1", "AV12", "AV13")
@pytest.mark.parametrize("seed", [1, 2])
def test_the_region_survives_loss_of_a_data_center_with_leaders(seed: int) -> None:
    """Standbys elsewhere become leaders, and lost tasks come back on the remaining machines.

    Half of the machines and the leader of each role lose power, while versions are released.
    """
    chosen = replace(scenario.load("roles"), minutes=6.0, faults=[])
    story = [
        "9.0s release job:job0",
        "9.5s release job:job1",
        "10.0s power-off datacenter:dc1 200.0s",
    ]
    story += [f"10.0s role-kill role:{role} 200.0s" for role in ("core", "shard-1", "shard-2")]
    story += ["60.0s release job:job2", "90.0s resize job:job3 value=1.0"]
    outcome = run_seed(chosen, seed, read("\n".join(story)))
    assert not outcome.violations, [str(violation) for violation in outcome.violations]
    assert outcome.figures["take-overs"] >= 3


@pytest.mark.behaviour("SH1", "AV7")
def test_tasks_left_on_a_machine_that_comes_back_free_are_removed() -> None:
    """The process of their shard removes the tasks, though it does not own the machine.

    The core follows free machines, and only the shard knows that the tasks moved away. Before the
    fix, their second copies ran forever.
    """
    chosen = scenario.load("roles-quiet")
    chosen = replace(chosen, minutes=7.0, settle_minutes=6.0, faults=[])
    outcome = run_seed(chosen, 1, read("10.0s cut job:job1 300.0s\n12.0s cut job:job2 300.0s"))
    assert not outcome.violations, [str(violation) for violation in outcome.violations]


@pytest.mark.behaviour("SH1", "AV7")
def test_a_lagging_core_stops_no_task_of_a_job_unknown_to_it() -> None:
    """The core follows a machine that it considers free; a shard has just begun to use it.

    Jobs come back while the core's connection to etcd is slow. Before the fix, the core considered
    their tasks unknown.
    """
    chosen = scenario.load("roles-promises")
    chosen = replace(chosen, minutes=3.0, settle_minutes=6.0, faults=[])
    story = "\n".join(
        f"{at + n / 10}s stop-job job:job{n} 12.0s\n{at + 11.5}s etcd-late role:core 6.0s value=3.0"
        for at in range(10, 170, 30)
        for n in range(3)
    )
    outcome = run_seed(chosen, 1, read(story))
    assert not outcome.violations, [str(violation) for violation in outcome.violations]


@pytest.mark.behaviour("SH14", "CP7")
def test_no_shard_uses_machines_promised_to_an_entitlement_of_another() -> None:
    """Shards share the free machines, which are hardly more than the quotas."""
    outcome = run_seed(scenario.load("roles-promises"), 2)
    assert not outcome.violations, [str(violation) for violation in outcome.violations]
    assert outcome.figures["moves"] >= 3


@pytest.mark.behaviour("SH14", "CP7")
def test_promises_that_are_kept_per_shard_only_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard holds back free machines only for the quotas of its own entitlements."""
    made = Quotas.__init__

    def blind(self: Quotas, region: Region, *rest: Any) -> None:
        made(self, region, *rest)
        whole = self.promises._quotas

        def own() -> dict[str, Quota]:
            return {pool: quota for pool, quota in whole().items() if region.owns(pool)}

        self.promises._quotas = own

    monkeypatch.setattr(Quotas, "__init__", blind)
    assert found("roles-promises", {"promises"}) <= MOST


@pytest.mark.behaviour("SH14", "CP7")
def test_promises_that_are_judged_before_machines_are_held_only_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two shards that take machines at once each see a machine to spare, and there is only one.

    All jobs come back at once while every connection to etcd is slow.
    """

    async def confirmed(*_: Any) -> bool:
        return True

    monkeypatch.setattr(ShardProcesses, "_confirm_holds", confirmed)
    chosen = scenario.load("roles-promises")
    chosen = replace(chosen, minutes=4.0, settle_minutes=6.0, faults=[])
    story = "\n".join(
        f"{at + n / 10}s stop-job job:job{n} 12.0s\n{at + 8}s etcd-late role:{role} 12.0s value=1.2"
        for at in range(10, 230, 25)
        for n, role in enumerate(("core", "shard-1", "shard-2"))
    )
    for seed in range(1, MOST + 1):
        outcome = run_seed(chosen, seed, read(story))
        if any(violation.rule == "promises" for violation in outcome.violations):
            return
    raise AssertionError(f"none of {MOST} seeds takes what another entitlement was promised")


@pytest.mark.behaviour("AV2")
def test_a_write_of_a_replaced_leader_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison with the leader's key, a late write of an old leader is made."""
    request = EtcdStore._request

    def traced_request(self: EtcdStore, *arguments: Any) -> Any:
        made = request(self, *arguments)
        del made.compare[0]
        return made

    monkeypatch.setattr(EtcdStore, "_request", traced_request)
    assert found("roles-late", {"stale-write"}) <= MOST


@pytest.mark.behaviour("SH4")
def test_two_owners_after_a_crash_in_a_move_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that starts uses what its process owned before, and not the map."""
    kept: dict[int, set[str]] = {}

    def owner(ownership: OwnershipMap, number: int) -> Callable[[str], bool]:
        previous, seen = set(kept.get(number, ())), set[str]()

        def owns(pool: str) -> bool:
            if ownership.shard_of(pool) == number and not ownership.is_moving(pool):
                kept.setdefault(number, set()).add(pool)
                seen.add(pool)
                return True
            if pool in seen:
                kept[number].discard(pool)
                return False
            return pool in previous

        return owns

    monkeypatch.setattr(running_shards, "_owner", owner)
    assert found("roles-quiet", {"one-owner"}) <= MOST


@pytest.mark.behaviour("SH13")
def test_pinned_entitlements_stay_in_their_region_and_in_shards_for_it() -> None:
    """Two regional shards and two global ones, with hardly more machines than quotas."""
    outcome = run_seed(scenario.load("roles-regions"), 1)
    assert not outcome.violations, [str(violation) for violation in outcome.violations]
    assert outcome.figures["moves"] >= 3


@pytest.mark.behaviour("SH13")
def test_a_shard_that_gets_an_entitlement_of_another_region_is_found(
    mocker: MockerFixture,
) -> None:
    """The substitute permits every move."""
    mocker.patch.object(scopes, "may_own", return_value=True)
    chosen = replace(scenario.load("roles-regions"), minutes=2.0, settle_minutes=4.0)
    assert "scope" in {violation.rule for violation in run_seed(chosen, 1).violations}


@pytest.mark.behaviour("SH13")
def test_a_machine_of_another_region_is_found(mocker: MockerFixture) -> None:
    """The substitute ignores regions in quotas and demands, and machines to spare."""
    without_region = demand.demand_of
    mocker.patch.object(demand, "demand_of", lambda *given: without_region(*given[:3]))
    mocker.patch.object(pools, "Quota", lambda *given: Quota(*given[:5]))
    chosen = replace(scenario.load("roles-regions"), minutes=2.0, settle_minutes=4.0)
    shape, work = replace(chosen.shape, machines=32), replace(chosen.work, spare=1.5)
    outcome = run_seed(replace(chosen, shape=shape, work=work), 1)
    assert "pins" in {violation.rule for violation in outcome.violations}
