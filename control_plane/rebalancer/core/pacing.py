"""Which moves of a plan begin now, and the outcome of those that began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from control_plane.api.rebalancing import MoveState, MoveView, RebalancePlan
from control_plane.rebalancer.core.survey import Load

_NOTHING = 0.05
"""Gain that is not worth talking of: one machine that is used by 5 % too much."""
OPEN = (MoveState.PLANNED, MoveState.WAITING, MoveState.MOVING)


@dataclass(frozen=True, slots=True)
class TaskNow:
    """How a task of a move stands."""

    serves_on: str
    """Empty: it does not serve."""
    ordered_to: str
    """Where the ReBalancer has it move; empty: nowhere."""
    has_begun: bool
    """It was taken down for that."""
    exists: bool = True


def followed(move: MoveView, task: TaskNow, now: float, patience_s: float) -> MoveView:
    """Return a move that was begun with its present state and outcome."""
    if move.state not in (MoveState.WAITING, MoveState.MOVING):
        return move
    if task.serves_on == move.to_machine and not task.ordered_to:
        return to(move, MoveState.DONE, now)
    if not task.exists:
        return to(move, MoveState.WITHDRAWN, now, "the task is gone")
    if task.ordered_to:
        state = MoveState.MOVING if task.has_begun else MoveState.WAITING
        return to(move, state, now) if state is not move.state else move
    if task.serves_on == move.from_machine:
        return to(move, MoveState.WITHDRAWN, now, move.reason or "its job had another operation")
    if task.serves_on:
        return to(move, MoveState.FAILED, now, f"the task moved to {task.serves_on}")
    if now - move.at > patience_s:
        return to(move, MoveState.FAILED, now, "the task did not become healthy in time")
    return move


def resumed(move: MoveView, task: TaskNow, now: float, why: str, *, is_recorded: bool) -> MoveView:
    """Return a move of an earlier process's plan as it stands now.

    `why` withdraws what has not begun; `is_recorded`: the history has its end already.
    """
    if is_recorded or task.serves_on == move.to_machine:
        return to(move, MoveState.DONE, now, move.reason)
    if task.ordered_to == move.to_machine and (task.has_begun or not why):
        return to(move, MoveState.MOVING if task.has_begun else MoveState.WAITING, now)
    if why:
        return to(move, MoveState.WITHDRAWN, now, why)
    return to(move, MoveState.PLANNED, now)


def gap_of(plan: RebalancePlan) -> float | None:
    """Return the share of what could be gained at best that a plan does not gain."""
    if plan.bound is None:
        return None
    possible = sum(goal.before for goal in plan.goals) - plan.bound
    return max(0.0, 1.0 - plan.gain / possible) if possible > _NOTHING else 0.0


def to(move: MoveView, state: MoveState, now: float, reason: str = "") -> MoveView:
    """Return a move in a state."""
    return replace(move, state=state, at=now, reason=reason)


def is_late(move: MoveView, now: float, patience_s: float) -> bool:
    """Return whether a move waits for too long to begin."""
    return move.state is MoveState.WAITING and now - move.at > patience_s


def next_moves(moves: Sequence[MoveView], most: int) -> list[MoveView]:
    """Return the moves that may begin next: of the first wave that is not over, within `most`."""
    waves = [move.wave for move in moves if move.state in OPEN]
    if not waves:
        return []
    active = sum(1 for move in moves if move.state in (MoveState.WAITING, MoveState.MOVING))
    first = min(waves)
    planned = [m for m in moves if m.wave == first and m.state is MoveState.PLANNED]
    return planned[: max(0, most - active)]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two machines of a move, as it is used now."""

    used: Sequence[float]
    sizes: Load
    limits: Sequence[float]
    """By dimension, the use from which on the plan called it too much."""


def still_gains(
    source: Side, target: Side, load: Load, cost: Callable[[Side], float], price: float
) -> bool:
    """Return whether a move is worth its price as the two machines are used now."""
    less = [u - part for u, part in zip(source.used, load, strict=True)]
    more = [u + part for u, part in zip(target.used, load, strict=True)]
    before = cost(source) + cost(target)
    after = cost(Side(less, source.sizes, source.limits)) + cost(
        Side(more, target.sizes, target.limits)
    )
    return before - after > price


def cost_with(balance: float, hot: float, hot_from: float) -> Callable[[Side], float]:
    """Return what a machine costs by these weights, as the solver counts it."""

    def cost(side: Side) -> float:
        found = 0.0
        for used, size, limit in zip(side.used, side.sizes, side.limits, strict=True):
            if size > 0:
                share = used / size
                found += balance * max(0.0, share - limit) + hot * max(0.0, share - hot_from)
        return found

    return cost
