"""Makes plans: surveys the region, calls the solver, and describes its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from control_plane.agents.region import Region
from control_plane.allocator.core.machine_pools import Machine
from control_plane.allocator.core.preferences import preferences_of
from control_plane.allocator.core.region_index import STEP
from control_plane.allocator.core.request import Request
from control_plane.api.jobs import JobRecord
from control_plane.api.machines import EventKind
from control_plane.api.rebalancing import (
    MoveExplanation,
    MoveState,
    MoveView,
    PowerUse,
    RebalancePlan,
    SwapState,
    SwapView,
)
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.unavailability import open_event
from control_plane.portal.core.report import SMALL_MACHINES
from control_plane.rebalancer.core.language import toml_of
from control_plane.rebalancer.core.model import (
    DIMENSIONS,
    FLOAT,
    Effort,
    RegionModel,
    SolverAnswer,
    Weights,
)
from control_plane.rebalancer.core.place_use import PlaceSums
from control_plane.rebalancer.core.region_language import describe_region, placement_model_of
from control_plane.rebalancer.core.survey import JobTerms, Survey, SurveySources
from control_plane.rebalancer.load_watch import LoadWatch
from control_plane.rebalancer.ports import ShardedPlaces, Solve
from control_plane.runtime.table import Table
from control_plane.scheduler.core.rollout import is_quiet
from control_plane.scheduler.job_control import STAYING

MODEL = "model"
"""Name with which `explain` describes the model instead of a move."""
_FREE_CHECKED_MAX = 5_000
"""Free machines that are checked for those that a pool may take."""


class Planner:
    """Makes plans, and changes nothing else."""

    def __init__(
        self,
        region: Region,
        jobs: Table[JobRecord],
        places: ShardedPlaces,
        solve: Solve,
        watch: LoadWatch,
        moved_at: Callable[[str], Mapping[int, float]],
    ) -> None:
        """`moved_at` returns task → its last move, in seconds since 1970, for a job."""
        self._runtime, self._settings = region.runtime, region.settings.rebalance
        self._jobs, self._places, self._solve = jobs, places, solve
        self._machine_of = region.broker.table.find
        self._watch, self._moved_at = watch, moved_at
        self.weights = Weights(
            hot_from=self._settings.hot_from,
            tolerance=self._settings.tolerance,
            move=self._settings.move_price,
        )
        self.limits: dict[str, list[float]] = {}
        """Pool → the share of each dimension above which a machine cost in the last plan."""

    async def plan(self, number: int, only: Collection[str] | None = None) -> RebalancePlan:
        """Return a plan for the present state, `only` for these pools; raises `Busy`."""
        model = await self._survey(only)
        effort = Effort(
            seconds=self._settings.solve_s,
            moves=self._settings.moves_per_plan,
            swaps=self._settings.swaps_per_plan if only is None else 0,
        )
        answer = await self._solve(model, effort)
        self.limits |= answer.limits
        made = _plan_of_answer(number, model, answer, self._runtime.date())
        sums = await self._sums(model, answer)
        return replace(
            made,
            only=sorted(only) if only is not None else [],
            oldest_load_s=self._watch.age_s(),
            watts_measured=sums.measured,
            places=sums.uses(),
            power=[
                PowerUse(place=p.name, limit_w=p.limit_w, before_w=before, after_w=after)
                for p, (before, after) in zip(model.places, answer.watts, strict=True)
            ],
        )

    async def explain(self) -> MoveExplanation:
        """Return the model that a plan would use now, as text and in TOML."""
        model = await self._survey(None)
        return MoveExplanation(
            lines=describe_region(model), model="\n".join(toml_of(placement_model_of(model)))
        )

    async def _sums(self, model: RegionModel, answer: SolverAnswer) -> PlaceSums:
        """Sum the use of each MSB and row, before the plan and after it."""
        sums = PlaceSums()
        machines, wide = self._places.indexes[0].machines, len(DIMENSIONS)
        before, after = (memoryview(column).cast(FLOAT) for column in answer.used)
        for at, name in enumerate(model.machines):
            machine, first = machines.get(name), at * wide
            if machine is not None:
                used = before[first : first + wide], after[first : first + wide]
                sums.add(machine.place, model.sizes[at], *used)
                sums.measured += self._watch.watts(machine, 0.0)[1]
            if at % STEP == STEP - 1:
                await self._runtime.checkpoint()
        return sums

    def terms(self, job: str, neighbours: Collection[str] | None = None) -> JobTerms | None:
        """Return the rules for moves of a job's tasks; None: none of them may move now.

        `neighbours` are the jobs that others name as neighbours; None: they are searched.
        """
        record = self._jobs.find(job)
        if record is None or record.stopping or record.paused or not is_quiet(record):
            return None
        spec = record.spec
        if spec.update.max_unavailable < 1 and spec.controller is None:
            return None
        if any(volume.kind in STAYING for volume in spec.volumes.values()):
            return None
        neighbours = self._neighbour_jobs() if neighbours is None else neighbours
        if spec.apart_from or spec.together_with or job in neighbours:
            return None
        preferences = preferences_of(spec, self._places.entitlement_of(spec))
        return JobTerms(preferences, self._movable(record).__contains__)

    def _movable(self, record: JobRecord) -> set[int]:
        """Return the tasks of a quiet job that may move now."""
        settled = self._runtime.date() - self._settings.settle_s
        rested = self._runtime.date() - self._settings.rest_s
        moved = self._moved_at(record.name)
        return {
            task.index
            for task in record.tasks
            if task.since <= settled
            and task.operation is None
            and not task.extra
            and (not moved or moved.get(task.index, rested) <= rested)
        }

    def _neighbour_jobs(self) -> set[str]:
        """Return the jobs that others name in `apart_from` or `together_with`."""
        return {
            neighbour.job
            for record in self._jobs.values()
            for neighbour in (*record.spec.apart_from, *record.spec.together_with)
        }

    def _is_swappable(self, machine: Machine) -> bool:
        """Return whether a machine may go to another entitlement: no loan, no quota by type."""
        record, pool = self._machine_of(machine.name), self._places.granted(machine.pool)
        if record is None or pool is None or machine.blocked or record.loan is not None:
            return False
        spec = pool.spec
        return not (spec.per_type or spec.machine_types or spec.datacenter or spec.region)

    def _stack_of(self, pool: str) -> object:
        """Return a key that is equal for entitlements that could share machines.

        None: the entitlement is too large, or has a kind of quota that excludes sharing.
        """
        record = self._places.granted(pool)
        if record is None or record.spec.materialization or record.spec.elastic is not None:
            return None
        spec = record.spec
        if (spec.machines or 0) > SMALL_MACHINES or spec.per_type or spec.rru:
            return None
        rules = (*sorted(spec.requires), *sorted(spec.machine_types))
        where = spec.datacenter, spec.region
        return spec.host_profile, where, rules, tuple(spec.relaxations)

    def _is_capped(self, machine: Machine) -> bool:
        record = self._machine_of(machine.name)
        return record is not None and open_event(record, EventKind.POWER_CAP) is not None

    async def _survey(self, only: Collection[str] | None) -> RegionModel:
        neighbours = self._neighbour_jobs()
        sources = SurveySources(
            indexes=self._places.indexes,
            owner=self._places.owner,
            terms=lambda job: self.terms(job, neighbours),
            measured=self._watch.measured,
            offered=self._offered,
            watts=self._watch.watts,
            capped=self._is_capped,
            swappable=self._is_swappable if self._settings.swaps_per_plan else None,
            stack_of=self._stack_of if only is None else lambda _pool: None,
            limit_share=self._settings.power_from,
        )
        steps = Survey(sources, self.weights, self._settings.free_machines, only).run()
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                model: RegionModel = stop.value
                return model
            await self._runtime.checkpoint()

    def _offered(self, pool: str, hot: Mapping[str, int], most: int) -> Sequence[Machine]:
        """Return free machines that a pool may take, those in the MSBs of its hot machines first.

        The tasks of a job that is spread evenly over MSBs can only move within an MSB.
        """
        index, near, far = self._places.owner(pool), list[Machine](), list[Machine]()
        if most < 1:
            return near
        quotas = self._places.of_pool(pool).quotas
        allowance, left = quotas.allowance(Request("", pool)), Counter(hot)
        free = index.pool(FREE)
        if not allowance.may_take_from(free):
            return near
        for machine in islice(free.machines(), _FREE_CHECKED_MAX):
            if len(near) >= most:
                break
            refused = allowance.refuses is not None and allowance.refuses(machine)
            if refused or machine.blocked or machine.jobs or index.why_short(machine):
                continue
            if left[machine.place.msb] > 0:
                left[machine.place.msb] -= 1
                near.append(machine)
            elif len(far) < most:
                far.append(machine)
        found = []
        for machine in (*near, *far)[:most]:
            if not allowance.lacks(machine):
                allowance.take(machine)
                found.append(machine)
        return found


def _plan_of_answer(
    number: int, model: RegionModel, answer: SolverAnswer, now: float
) -> RebalancePlan:
    return RebalancePlan(
        number=number,
        made_at=now,
        took_s=round(answer.took_s, 3),
        goals=answer.scores,
        gain=answer.gain,
        price=answer.price,
        bound=answer.bound,
        hot_before=answer.hot_before,
        hot_after=answer.hot_after,
        is_complete=answer.is_complete,
        machines=len(model.machines),
        tasks=len(model.tasks.can_move),
        movable=sum(model.tasks.can_move),
        measured=model.measured,
        moves=_numbered_moves(number, answer.moves, now),
        swaps=[
            replace(swap, id=f"s{number}.{place}", gain=round(swap.gain, 4), at=now)
            for place, swap in enumerate(answer.swaps, 1)
        ],
        limits=answer.limits,
        used={
            pool: {
                name: round(limit - model.weights.tolerance, 4)
                for name, limit in zip(DIMENSIONS, limits, strict=True)
            }
            for pool, limits in answer.limits.items()
        },
        stacks=answer.stacks,
    )


def _numbered_moves(number: int, moves: Sequence[MoveView], now: float) -> list[MoveView]:
    return [
        replace(
            move,
            id=f"p{number}.{place}",
            gain=round(move.gain, 4),
            power_gain=round(move.power_gain, 4),
            price=round(move.price, 4),
            at=now,
        )
        for place, move in enumerate(moves, 1)
    ]


_STATES = {
    MoveState.PLANNED: "It is planned, and begins after earlier moves.",
    MoveState.WAITING: "It waits for its job's budget, for its controller, or for its image.",
    MoveState.MOVING: "The task is moving.",
    MoveState.DONE: "The task is healthy there.",
    MoveState.WITHDRAWN: "It failed or was withdrawn",
    MoveState.FAILED: "It failed",
}


def explain_move(move: MoveView, now: float) -> list[str]:
    """Return lines with the reason for a move and its progress."""
    lines = [
        f"Task {move.job}-{move.task} should move from {move.from_machine} to {move.to_machine}.",
        f"It relieves {move.why}.",
        f"The sum of the goals falls by {move.gain:.3f}; the move costs {move.price:.3f}.",
    ]
    if move.gain < move.price:
        lines.append("It makes room for another move of the plan, which gains more.")
    if move.wave:
        lines.append(f"It begins after wave {move.wave}, whose moves free the room for it.")
    state = _STATES[move.state]
    lines.append(f"{state}: {move.reason}." if move.reason else state)
    lines.append(f"This state has lasted {max(0.0, now - move.at):.0f} s.")
    return lines


_SWAP_STATES = {
    SwapState.PLANNED: "It is planned, and begins after the moves of its plan.",
    SwapState.DRAINING: "The tasks of both machines leave them.",
    SwapState.HANDING_OVER: (
        "Both machines are empty, and are being assigned to the other entitlement."
    ),
    SwapState.DONE: "Each entitlement has the machine of the other.",
    SwapState.WITHDRAWN: "It was withdrawn",
    SwapState.FAILED: "It failed",
}


def explain_swap(swap: SwapView, now: float) -> list[str]:
    """Return lines with the reason for an exchange of machines and its progress."""
    state = _SWAP_STATES[swap.state]
    between = f" between {swap.pool_one} and {swap.pool_two}" if swap.pool_one else ""
    return [
        f"Machines {swap.one} and {swap.two} are exchanged{between}.",
        f"Why: {swap.why}.",
        f"The sum of the goals falls by {swap.gain:.3f}; the exchange costs {swap.price:.3f}.",
        f"{state}: {swap.reason}." if swap.reason else state,
        f"This state has lasted {max(0.0, now - swap.at):.0f} s.",
    ]
