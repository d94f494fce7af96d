"""Small entitlements are packed on the machines of few, as far as that saves machines."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from test_rebalancer import BIG, Rebalanced, in_region
from test_solving import a_region, solved
from world import a_job

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.rebalancing import StackView
from control_plane.rebalancer.core.language import describe_model, read_model, toml_of
from control_plane.rebalancer.core.model import RegionModel
from control_plane.rebalancer.core.region_language import placement_model_of
from tests.rebalancer_models import a_model

pytestmark = pytest.mark.behaviour("MO16", "CP8")


def pools(claims: list[list[int]], classes: list[int]) -> RegionModel:
    """Return entitlements whose machines of ten cores have these numbers of one-core tasks."""
    machines = [[1.0] * tasks for pool in claims for tasks in pool]
    of = [p for p, pool in enumerate(claims) for _ in pool]
    model = a_region(machines, pools=of, sizes=[(10.0, 64.0 * 2**30, 0.0)] * len(of))
    room = [((64 - len(tasks)) * 2**30, 0, 0, 0, 100) for tasks in machines]
    return replace(model, stack_class=classes, room=room)


def test_small_entitlements_stack_where_they_fit_and_free_most_machines() -> None:
    """An entitlement with two machines moves to another's machine. That frees as many machines as
    two others would."""
    model = pools([[3, 3], [2], [4], [9]], [0, 0, 0, 0])

    assert solved(model).stacks == [StackView(on="pool1", entitlements=["pool0"], machines=2)]


def test_entitlements_of_another_class_and_large_ones_do_not_stack() -> None:
    assert solved(pools([[1], [1], [1]], [0, 1, -1])).stacks == []
    assert solved(pools([[1], [1]], [])).stacks == []


def test_full_entitlements_do_not_stack() -> None:
    assert solved(pools([[6], [6]], [0, 0])).stacks == []


def test_many_entitlements_are_packed_without_the_exact_solver() -> None:
    model = pools([[2]] * 60, [0] * 60)

    freed = sum(stack.machines for stack in solved(model).stacks)
    # five entitlements fit on a machine, so at most four of five machines are freed
    assert 40 <= freed <= 45


def test_a_plan_proposes_what_the_report_counts() -> None:
    """The report has the most that stacking can save. The plan has which entitlements stack on
    which."""

    async def body(w: Rebalanced) -> None:
        await w.set_up(6)
        for name in ("tiny1", "tiny2", "tiny3"):
            await w.cp.capacity.put_entitlement(name, EntitlementSpec(machines=2))
            await w.cp.apply_job(a_job(1, name=f"job-{name}", entitlement=name, limits=BIG))
            await w.stable(f"job-{name}")
        await asyncio.sleep(1)

        plan = await w.cp.rebalancer.plan()
        report = (await w.cp.capacity.report()).fragmentation

        assert [stack.machines for stack in plan.stacks] == [report.stacks_save] == [2]
        assert plan.moves == []

    in_region(body)


def test_a_region_is_a_model_of_the_small_language() -> None:
    """The model has claims, use, permitted machines and goals, as text and in TOML."""
    model = placement_model_of(a_model(3, 8, 40))

    assert read_model("\n".join(toml_of(model))) == model
    words = describe_model(model)
    assert words[0] == "40 objects in 8 containers."
    assert any(line.startswith("Dimension claimed cpu: ") for line in words)
    assert "Constraint: no container has more claimed memory in use than it offers." in words
    assert any(line.startswith("Goal: less of 1 x share of cpu") for line in words)
