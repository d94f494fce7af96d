"""Proposes which small entitlements to stack on the machines of one: a placement model.

Each entitlement with few machines is both an object and a container. Entitlements may share
machines if they have one host profile, one data center and the same requirements. They are packed
on the fewest machines that hold what their tasks claim together. Owners decide on the proposals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from control_plane.api.rebalancing import StackView
from control_plane.rebalancer.core.annealing import annealed
from control_plane.rebalancer.core.language import (
    FitsIn,
    ModelContainer,
    ModelObject,
    MovedObjects,
    PlacementModel,
    UsedContainers,
)
from control_plane.rebalancer.core.region_state import RegionState

FULL = 0.9
"""Share of an entitlement's machines that all entitlements stacked on it may claim. The rest is
lost because tasks cannot be split."""
_SECONDS = 5.0
_VARIABLES_MAX = 2_500
"""The most pairs of entitlements that HiGHS solves within `_SECONDS`; more pairs are annealed."""
_STEPS = 100_000
_SAVING_MIN = 0.3
"""The least saving, in machines, for stacking one entitlement: its jobs are rolled out again."""


def proposed_stacks(state: RegionState, clock: Callable[[], float]) -> list[StackView]:
    """Return which small entitlements to stack on which, largest saving first.

    Without HiGHS there are none.
    """
    try:
        from control_plane.rebalancer.core.exact import optimum
    except ImportError:
        return []
    proposals: list[StackView] = []
    for pools in _classes(state).values():
        model = stacking_model(state, pools)
        if len(pools) ** 2 <= _VARIABLES_MAX:
            moves = optimum(model, clock, _SECONDS).moves
        else:
            moves = annealed(model, clock, _SECONDS, _STEPS).moves
        held = {c.name: int(c.offers["machines"]) for c in model.containers}
        onto: defaultdict[str, list[str]] = defaultdict(list)
        for name, _, to in moves:
            onto[to].append(name)
        proposals += [
            StackView(on=on, entitlements=names, machines=sum(held[name] for name in names))
            for on, names in sorted(onto.items())
            if on not in {name for name, _, _ in moves}
        ]
    return sorted(proposals, key=lambda proposal: -proposal.machines)


def _classes(state: RegionState) -> dict[int, list[int]]:
    """Return by class the small entitlements that may share machines, if there are several."""
    with_machines = set(state.pool[~state.is_free].tolist())
    classes = defaultdict[int, list[int]](list)
    for pool, stack_class in enumerate(state.model.stack_class):
        if stack_class >= 0 and pool in with_machines:
            classes[stack_class].append(pool)
    return {number: pools for number, pools in classes.items() if len(pools) > 1}


def stacking_model(state: RegionState, pools: list[int]) -> PlacementModel:
    """Return the model of entitlements that may share machines, each on its own machines."""
    model, objects, containers = state.model, list[ModelObject](), list[ModelContainer]()
    for pool in pools:
        machines = np.nonzero((state.pool == pool) & ~state.is_free)[0]
        size = state.sizes[machines]
        left = state.room_cpu[machines] / (state.grains[machines, 0] * 1e6)
        cpu = float((size[:, 0] - left).sum())
        memory = float((size[:, 1] - state.room[machines, 0]).sum())
        name = model.pools[pool]
        objects.append(
            ModelObject(
                name=name, at=name, needs={"cpu": max(0.0, cpu), "memory": max(0.0, memory)}
            )
        )
        room = {"cpu": max(FULL * float(size[:, 0].sum()), cpu)}
        room["memory"] = max(FULL * float(size[:, 1].sum()), memory)
        containers.append(
            ModelContainer(name=name, offers={**room, "machines": float(len(machines))})
        )
    return PlacementModel(
        objects=objects,
        containers=containers,
        constraints=[FitsIn(dimension="cpu"), FitsIn(dimension="memory")],
        goals=[
            UsedContainers(each={c.name: c.offers["machines"] for c in containers}),
            MovedObjects(each=_SAVING_MIN),
        ],
    )
