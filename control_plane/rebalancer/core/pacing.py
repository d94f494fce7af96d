"""Decides which moves of a plan begin now, and updates the states of moves that have begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from control_plane.api.rebalancing import MoveState, MoveView, RebalancePlan
from control_plane.rebalancer.core.machine_use import Load
from control_plane.rebalancer.core.model import Weights

_NEGLIGIBLE = 0.05
"""A possible gain up to this counts as none: it is one machine that is used 5 % too much."""
ACTIVE = (MoveState.WAITING, MoveState.MOVING)
OPEN = (MoveState.PLANNED, *ACTIVE)


@dataclass(frozen=True, slots=True)
class TaskNow:
    """The present state of a task that a move is about."""

    serves_on: str
    """The machine on which the task serves; empty: none."""
    ordered_to: str
    """The machine that the ReBalancer ordered the task to; empty: none."""
    has_begun: bool
    """The task was stopped for the move."""
    exists: bool = True


def update_move(move: MoveView, task: TaskNow, now: float, patience_s: float) -> MoveView:
    """Return a begun move with its present state, or with its outcome if it has ended."""
    if move.state not in ACTIVE:
        return move
    if task.serves_on == move.to_machine and not task.ordered_to:
        return with_state(move, MoveState.DONE, now)
    if not task.exists:
        return with_state(move, MoveState.WITHDRAWN, now, "the task is gone")
    if task.ordered_to:
        state = MoveState.MOVING if task.has_begun else MoveState.WAITING
        return with_state(move, state, now) if state is not move.state else move
    if task.serves_on == move.from_machine:
        return with_state(
            move, MoveState.WITHDRAWN, now, move.reason or "its job had another operation"
        )
    if task.serves_on:
        return with_state(move, MoveState.FAILED, now, f"the task moved to {task.serves_on}")
    if now - move.at > patience_s:
        return with_state(move, MoveState.FAILED, now, "the task did not become healthy in time")
    return move


def resume_move(move: MoveView, task: TaskNow, now: float, why: str) -> MoveView:
    """Return a move of an earlier process's plan with its present state.

    `why` is the reason to withdraw a move that has not begun; empty: it may still begin.
    """
    if task.serves_on == move.to_machine and not task.ordered_to:
        return with_state(move, MoveState.DONE, now, move.reason)
    if task.ordered_to == move.to_machine and (task.has_begun or not why):
        return with_state(move, MoveState.MOVING if task.has_begun else MoveState.WAITING, now)
    if why:
        return with_state(move, MoveState.WITHDRAWN, now, why)
    return with_state(move, MoveState.PLANNED, now)


def gap_of(plan: RebalancePlan) -> float | None:
    """Return the share of the possible gain that a plan misses; None: the bound is unknown."""
    if plan.bound is None:
        return None
    possible = sum(goal.before for goal in plan.goals) - plan.bound
    return max(0.0, 1.0 - plan.gain / possible) if possible > _NEGLIGIBLE else 0.0


def with_state(move: MoveView, state: MoveState, now: float, reason: str = "") -> MoveView:
    """Return a move with a new state."""
    return replace(move, state=state, at=now, reason=reason)


def is_late(move: MoveView, now: float, patience_s: float) -> bool:
    """Return whether a move has waited too long to begin."""
    return move.state is MoveState.WAITING and now - move.at > patience_s


def next_moves(moves: Sequence[MoveView], most: int) -> list[MoveView]:
    """Return planned moves of the first unfinished wave; at most `most` moves are active."""
    waves = [move.wave for move in moves if move.state in OPEN]
    if not waves:
        return []
    active = sum(1 for move in moves if move.state in ACTIVE)
    first = min(waves)
    planned = [m for m in moves if m.wave == first and m.state is MoveState.PLANNED]
    return planned[: max(0, most - active)]


@dataclass(frozen=True, slots=True)
class MachineUse:
    """The present use of a machine."""

    used: Sequence[float]
    sizes: Load
    limits: Sequence[float]
    """By dimension, the share of use above which the machine costs."""


def still_gains(
    source: MachineUse,
    target: MachineUse,
    load: Load,
    cost: Callable[[MachineUse], float],
    price: float,
) -> bool:
    """Return whether a move gains more than its price at the present use of both machines."""
    source_used = [used - part for used, part in zip(source.used, load, strict=True)]
    target_used = [used + part for used, part in zip(target.used, load, strict=True)]
    source_after = MachineUse(source_used, source.sizes, source.limits)
    target_after = MachineUse(target_used, target.sizes, target.limits)
    return cost(source) + cost(target) - cost(source_after) - cost(target_after) > price


def cost_function(weights: Weights) -> Callable[[MachineUse], float]:
    """Return the solver's cost function of a machine for these weights."""

    def cost(machine: MachineUse) -> float:
        total = 0.0
        for used, size, limit in zip(machine.used, machine.sizes, machine.limits, strict=True):
            if size > 0:
                share = used / size
                over, hot = max(0.0, share - limit), max(0.0, share - weights.hot_from)
                total += weights.balance * over + weights.hot * hot
        return total

    return cost
