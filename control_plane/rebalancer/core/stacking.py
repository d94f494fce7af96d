"""Which small entitlements should stack on the machines of one: a model in the small language.

Each entitlement with few machines is an object and a container at once. Those that may share
machines (one host profile, one data center, the same requirements) are packed on as few machines
as hold what their tasks claim together. It is a proposal: what jobs stand on is decided by owners.
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
from control_plane.rebalancer.core.state import State

FULL = 0.9
"""Of the machines of one entitlement, what those on it may claim together: tasks come in pieces."""
_SECONDS = 5.0
_VARIABLES = 2_500
"""Pairs that HiGHS solves within the time; annealing packs more of them."""
_STEPS = 100_000
_TROUBLE = 0.3
"""What stacking one entitlement must save, in machines: its jobs are rolled out again."""


def stacked(state: State, clock: Callable[[], float]) -> list[StackView]:
    """Return which small entitlements to stack on which, those that save most first.

    None without HiGHS.
    """
    try:
        from control_plane.rebalancer.core.exact import optimum
    except ImportError:
        return []
    found = []
    for pools in _classes(state).values():
        model = stacking_model(state, pools)
        if len(pools) ** 2 <= _VARIABLES:
            moves = optimum(model, clock, _SECONDS).moves
        else:
            moves = annealed(model, clock, _SECONDS, _STEPS).moves
        held = {c.name: int(c.offers["machines"]) for c in model.containers}
        onto: defaultdict[str, list[str]] = defaultdict(list)
        for name, _, to in moves:
            onto[to].append(name)
        found += [
            StackView(on=on, entitlements=names, machines=sum(held[name] for name in names))
            for on, names in sorted(onto.items())
            if on not in {name for name, _, _ in moves}
        ]
    return sorted(found, key=lambda step: -step.machines)


def _classes(state: State) -> dict[int, list[int]]:
    """Return by class the small entitlements that may share machines, where there are several."""
    held, found = set(state.pool[~state.is_free].tolist()), defaultdict[int, list[int]](list)
    for pool, kind in enumerate(state.model.stack_class):
        if kind >= 0 and pool in held:
            found[kind].append(pool)
    return {kind: pools for kind, pools in found.items() if len(pools) > 1}


def stacking_model(state: State, pools: list[int]) -> PlacementModel:
    """Return the model of entitlements that may share machines; each is where it is now."""
    model, objects, containers = state.model, list[ModelObject](), list[ModelContainer]()
    for pool in pools:
        mine = np.nonzero((state.pool == pool) & ~state.is_free)[0]
        size = state.sizes[mine]
        left = state.room_cpu[mine] / (state.grains[mine, 0] * 1e6)
        cpu = float((size[:, 0] - left).sum())
        memory = float((size[:, 1] - state.room[mine, 0]).sum())
        name = model.pools[pool]
        objects.append(
            ModelObject(
                name=name, at=name, needs={"cpu": max(0.0, cpu), "memory": max(0.0, memory)}
            )
        )
        room = {"cpu": max(FULL * float(size[:, 0].sum()), cpu)}
        room["memory"] = max(FULL * float(size[:, 1].sum()), memory)
        containers.append(ModelContainer(name=name, offers={**room, "machines": float(len(mine))}))
    return PlacementModel(
        objects=objects,
        containers=containers,
        constraints=[FitsIn(dimension="cpu"), FitsIn(dimension="memory")],
        goals=[
            UsedContainers(each={c.name: c.offers["machines"] for c in containers}),
            MovedObjects(each=_TROUBLE),
        ],
    )
