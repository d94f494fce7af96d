"""Jobs with their own init: what a job file may state, and that the entitlement must allow it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from virtual_time import run
from world import World, a_job, a_region

from agent.api import NetworkMode, Reach, Relaxation
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.entitlement_rules import entitlement_relations
from control_plane.api.jobs import JobSpec
from control_plane.api.validate import job_errors
from wire.errors import InvalidInput

FILE: dict[str, Any] = {
    "name": "web",
    "entitlement": "front",
    "tasks": 1,
    "image": "sha256:" + "1" * 64,
    "relaxations": ["own-init"],
    "network": {"mode": "private"},
}


def a_machine() -> JobSpec:
    private = Reach(mode=NetworkMode.PRIVATE)
    given = [Relaxation.OWN_INIT]
    return replace(a_job(), command=[], relaxations=given, network=private)


async def report_capabilities(w: World, name: str, capabilities: list[str]) -> None:
    """Make a host report other capabilities than before."""
    machine = w.region.machines[name]
    machine.capabilities = capabilities
    machine.send_event("profile", "web")  # the control plane then reads its facts

    async def is_known() -> bool:
        facts = (await w.cp.get_machine(name)).record.facts
        return facts is not None and facts.capabilities == capabilities

    await w.until(is_known)


def test_all_keys_that_conflict_in_a_file_are_reported_at_once() -> None:
    assert job_errors(FILE) == []
    bad = {
        "command": ["/sbin/init"],
        "relaxations": ["own-init", "proc"],
        "network": {},
        "resources": {"hugepages_2mib": 4},
    }
    found = {e.field: e.reason for e in job_errors(FILE | bad)}
    assert {*found} == {*("command", "relaxations", "network.mode", "resources.hugepages_2mib")}
    assert "private" in found["network.mode"]


@pytest.mark.parametrize("command", [{}, {"command": ["/bin/x"]}])
def test_nested_without_own_init_is_one_error(command: dict[str, Any]) -> None:
    assert job_errors(FILE | {"relaxations": ["nested", "own-init"]}) == []
    (error,) = job_errors(FILE | {"relaxations": ["nested"]} | command)
    assert error.field == "relaxations"
    assert error.reason.startswith("nested requires own-init")
    others = {"relaxations": ["nested"], "tasks": -1, "network": {"mode": "none"}}
    assert {e.field for e in job_errors(FILE | others)} >= {"tasks", "network.mode"}


@pytest.mark.parametrize("command", [{}, {"command": []}])
def test_any_other_job_needs_a_command(command: dict[str, Any]) -> None:
    (error,) = job_errors(FILE | {"relaxations": []} | command)
    assert error.field == "command"
    assert error.reason.startswith("missing")


@pytest.mark.parametrize(("name", "why"), [("raw", "host-admin"), ("proc", "every job may have")])
def test_an_entitlement_allows_only_rights_that_need_permission(name: str, why: str) -> None:
    assert entitlement_relations({"machines": 1, "relaxations": ["own-init", "nested"]}) == []
    (error,) = entitlement_relations({"machines": 1, "relaxations": [name, "own-init"]})
    assert error.field == "relaxations"
    assert why in error.reason


@pytest.mark.behaviour("F-83")
def test_a_job_has_it_only_where_its_entitlement_allows_it() -> None:
    """Running tasks stay when the permission is withdrawn; the next version needs it again."""

    async def main() -> None:
        w = World(a_region())
        async with asyncio.timeout(20_000), w.running():
            for machine in w.region.machines.values():
                machine.capabilities = ["own-init"]
            await w.set_up()
            with pytest.raises(
                InvalidInput, match=r"entitlement '\w+' does not allow own-init"
            ) as refused:
                await w.cp.apply_job(a_machine())
            assert [e.field for e in refused.value.errors] == ["relaxations"]

            allowed = EntitlementSpec(
                machines=3, host_profile="web", relaxations=[Relaxation.OWN_INIT]
            )
            await w.cp.capacity.put_entitlement("front", allowed)
            await w.cp.apply_job(a_machine())
            await w.stable()
            specs = [s for m in w.region.machines.values() for s in m.specs.values()]
            assert {(*spec.relaxations, *spec.command) for spec in specs} == {("own-init",)}
            assert (await w.cp.job_planner.explain("web")).exposure == 5.5

            await w.cp.capacity.put_entitlement("front", replace(allowed, relaxations=[]))
            with pytest.raises(InvalidInput, match=r"entitlement '\w+' does not allow own-init"):
                await w.cp.apply_job(replace(a_machine(), stop_timeout_s=99.0))
            assert sum(w.alive().values()) == 6
        assert w.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("AL4", "AL6")
def test_its_tasks_go_only_to_hosts_that_say_they_can_start_them() -> None:
    """A plan reports why no host fits. Once a host can start them, waiting tasks are placed."""

    async def main() -> None:
        w = World(a_region())
        wanted = 'capability.own-init exists because "its tasks have the relaxation own-init"'
        async with asyncio.timeout(20_000), w.running():
            w.region.machines["m2"].capabilities = ["own-init"]
            await w.set_up(relaxations=[Relaxation.OWN_INIT])
            await w.cp.apply_job(replace(a_machine(), tasks=2))
            await w.stable()
            assert +w.alive() == {"m2": 2}

            await report_capabilities(w, "m2", [])
            plan = await w.cp.job_planner.plan(replace(a_machine(), tasks=3))
            assert plan.unplaced == [2]
            assert any(f"requirement not met: {wanted}" in reason for reason in plan.reasons)
            assert (plan.staying, plan.placed) == (2, [])

            await w.cp.apply_job(replace(a_machine(), tasks=3))
            await report_capabilities(w, "m3", ["own-init"])
            await w.stable()
            assert +w.alive() == {"m2": 2, "m3": 1}
        assert w.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("AL4", "F-83")
def test_nested_containers_can_be_allowed_alone_and_need_a_host_that_supports_them() -> None:
    """A host with an older agent cannot run them."""

    async def main() -> None:
        w = World(a_region())
        nested = replace(a_machine(), tasks=1, relaxations=[Relaxation.OWN_INIT, Relaxation.NESTED])
        async with asyncio.timeout(20_000), w.running():
            w.region.machines["m2"].capabilities = ["own-init"]
            await w.set_up(relaxations=[Relaxation.OWN_INIT])
            with pytest.raises(
                InvalidInput, match=r"entitlement '\w+' does not allow nested"
            ) as refused:
                await w.cp.apply_job(nested)
            assert [e.field for e in refused.value.errors] == ["relaxations"]
            keeps = "twinectl entitlement update front --relaxation nested --relaxation own-init"
            assert refused.value.errors[0].reason.endswith(keeps), (
                "what it allows already would be gone"
            )

            allowed = EntitlementSpec(
                machines=3, host_profile="web", relaxations=[*nested.relaxations]
            )
            await w.cp.capacity.put_entitlement("front", allowed)
            plan = await w.cp.job_planner.plan(nested)
            assert plan.unplaced == [0]
            lacking = 'capability.nested exists because "its tasks have the relaxation nested"'
            assert any(lacking in reason for reason in plan.reasons), plan.reasons

            await w.cp.apply_job(nested)
            await report_capabilities(w, "m2", ["own-init", "nested"])
            await w.stable()
            assert +w.alive() == {"m2": 1}
        assert w.region.broken_rules == []

    run(main())
