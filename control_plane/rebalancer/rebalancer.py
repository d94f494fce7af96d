"""Makes plans periodically, and begins their moves, a few at a time (RE1, RE5).

The current plan is stored as it was made. A pause, the times of moves and the history are stored
too. A restarted process continues a plan that is not too old, and withdraws the moves of an older
plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection

from msgspec.structs import replace

from control_plane.agents.pool import AgentPool
from control_plane.agents.region import Region
from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.feasibility import judge
from control_plane.allocator.core.machine_pools import Machine
from control_plane.api.jobs import JobRecord
from control_plane.api.limits import LimitName
from control_plane.api.machines import MachineRecord
from control_plane.api.rebalancing import (
    MoveExplanation,
    MoveState,
    MoveView,
    PauseRequest,
    RebalanceHistory,
    RebalancePlan,
    RebalanceStatus,
)
from control_plane.api.settings import RebalanceMode
from control_plane.broker.core.assignment import FREE
from control_plane.ops_planner.ports import Announcements
from control_plane.rebalancer.core.machine_use import Load, claimed_load, sizes_of, used_on
from control_plane.rebalancer.core.pacing import (
    ACTIVE,
    OPEN,
    MachineUse,
    TaskNow,
    cost_function,
    gap_of,
    is_late,
    next_moves,
    resume_move,
    still_gains,
    update_move,
    with_state,
)
from control_plane.rebalancer.load_watch import LoadWatch
from control_plane.rebalancer.planning import Planner, explain_move, explain_swap
from control_plane.rebalancer.ports import Moves, ShardedPlaces, Solve
from control_plane.rebalancer.records import RebalanceRecords
from control_plane.rebalancer.swaps import MachineSwaps
from control_plane.runtime.table import Table, ignore
from control_plane.store import Store
from wire.errors import NotFound, TwineError

log = logging.getLogger(__name__)
TICK_S = 5.0
"""Interval between two checks of moves that are under way."""
_RESUMED_PERIODS = 2.0
"""Age up to which a plan is continued after a restart, in intervals between two plans."""
_EARLY_SHARE = 0.2
"""Pools that got or lost machines get a plan after this share of the interval between two plans."""
GAPS = 3
"""Plans in a row that must miss much of the gain before an alarm: a single one may be unlucky."""


class ReBalancer:
    """Plans moves and begins them; the rest of the region works without it (RE7)."""

    def __init__(
        self,
        region: Region,
        jobs: Table[JobRecord],
        places: ShardedPlaces,
        moves: Moves,
        store: Store,
        solve: Solve,
        unwell: Callable[[], str],
        agents: AgentPool,
        drains: Announcements,
    ) -> None:
        """`unwell` returns why no task may be moved now; empty: moves are allowed."""
        self._settings, self._runtime = region.settings.rebalance, region.runtime
        self._jobs, self._places, self._moves, self._unwell = jobs, places, moves, unwell
        self.records = RebalanceRecords(store)
        self.watch = LoadWatch(region, places, agents)
        self.planner = Planner(region, jobs, places, solve, self.watch, self.records.moved_at)
        self.counts: Counter[MoveState] = Counter()
        """Moves that ended since this process started."""
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._touched: set[str] = set()
        """Pools that got or lost machines since the last plan."""
        region.broker.listen(self._on_machine_change, loaded=ignore)
        self._cost = cost_function(self.planner.weights)
        self.swaps = MachineSwaps(region, places, drains, self.records.table)
        self._limit = region.limits.of(
            LimitName.REBALANCE, self._settings.moves_per_s, self._settings.moves_burst
        )
        self._plan: RebalancePlan | None = None
        self._error = ""
        self._due_at: float | None = None

    async def load(self) -> None:
        """Read the stored plan and history."""
        await self.records.load()

    async def run(self) -> None:
        """Plan and move until cancelled, as far as the mode allows."""
        await self._resume()
        known = {(move.job, move.task) for move in self._active_moves()}
        for job, index in self._moves.waiting():
            if (job, index) not in known:
                await self._moves.withdraw(job, index)
        await self.swaps.end_unknown()
        if self._settings.mode is RebalanceMode.OFF:
            await self._end_exchanges()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self.watch.run())
            group.create_task(self._run())

    async def _end_exchanges(self) -> None:
        """End the exchanges of an earlier mode, whose machines would else stay drained."""
        while self.swaps.under_way():
            await self.swaps.follow("rebalancing is switched off")
            await self._runtime.sleep(TICK_S)

    async def _run(self) -> None:
        every_s = self._settings.every_s
        self._due_at = self._runtime.now() + every_s
        early_at = self._runtime.now()
        while True:
            await self._runtime.sleep(TICK_S)
            await self._update_moves()
            await self.swaps.follow(self._hold_reason())
            now = self._runtime.now()
            if now >= self._due_at and not self._active_moves():
                self._due_at = now + every_s
                early_at = now + every_s * _EARLY_SHARE
                self._touched.clear()
                await self._plan_again(None)
            elif self._touched and now >= early_at and not self._open_moves():
                early_at = now + every_s * _EARLY_SHARE
                touched, self._touched = self._touched, set()
                await self._plan_again(touched)
            if self._settings.mode is RebalanceMode.APPLY:
                await self._begin_moves()

    async def _resume(self) -> None:
        """Continue the plan of an earlier process, or withdraw its moves."""
        plan, now = self.records.plan, self._runtime.date()
        if plan is None:
            return
        ended = {move.id: move for move in self.records.state.history}
        why = "" if self._settings.mode is RebalanceMode.APPLY else "the mode is no longer apply"
        if now - plan.made_at > _RESUMED_PERIODS * self._settings.every_s:
            why = "the control plane restarted, and the plan is too old"
        self._plan = replace(plan, resumed_at=now)
        self.planner.limits |= plan.limits
        for move in plan.moves:
            if move.id in ended:
                self._replace_move(ended[move.id])
            else:
                await self._save_move(resume_move(move, self._task_now(move), now, why))
        if why:
            await self.records.put_plan(None)

    # -- planning

    async def plan(self) -> RebalancePlan:
        """Return a plan for the present state; moves nothing."""
        return await self.planner.plan(0)

    def _on_machine_change(
        self, _name: str, before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        """Record the pools that got or lost a machine; they get a plan soon."""
        states = {(r.entitlement, r.state) for r in (before, after) if r is not None}
        if before is None or after is None or len(states) > 1:
            self._touched |= {entitlement for entitlement, _ in states} - {FREE}

    async def _plan_again(self, only: Collection[str] | None) -> None:
        if self._hold_reason():
            return
        number = self.records.state.plans + 1
        try:
            made = await self.planner.plan(number, only)
        except TwineError as e:
            self._error = str(e)
            log.warning("no plan", extra={"reason": str(e)})
            return
        self._error = ""
        if only is not None and not made.moves:
            return
        for move in self._open_moves():
            now, why = self._runtime.date(), "a newer plan came first"
            await self._save_move(with_state(move, MoveState.WITHDRAWN, now, why))
        self._plan = made
        if (gap := gap_of(made)) is not None and len(made.moves) < self._settings.moves_per_plan:
            self._gaps.append(gap)
        log.info("planned", extra={"plan": number, "moves": len(made.moves)})
        await self.records.change(lambda state: replace(state, plans=number))
        await self.records.put_plan(made)
        oldest = self._runtime.date() - self._settings.rest_s
        await self.records.forget_moves(oldest, lambda job: self._jobs.find(job) is not None)

    # -- moving

    def _moves_of_plan(self) -> list[MoveView]:
        return self._plan.moves if self._plan is not None else []

    def _active_moves(self) -> list[MoveView]:
        return [move for move in self._moves_of_plan() if move.state in ACTIVE]

    def _open_moves(self) -> list[MoveView]:
        return [move for move in self._moves_of_plan() if move.state in OPEN]

    def _hold_reason(self) -> str:
        """Return why no move begins now; empty: moves may begin."""
        state = self.records.state
        if state.paused_by:
            return f"paused by {state.paused_by}: {state.paused_why}"
        return self._unwell()

    async def _update_moves(self) -> None:
        """Update begun moves from the state of their tasks; withdraw those that wait too long."""
        held, now = self._hold_reason(), self._runtime.date()
        for move in self._active_moves():
            is_waiting = move.state is MoveState.WAITING
            if is_waiting and (held or is_late(move, now, self._settings.patience_s)):
                why = held or "it did not begin in time: its job's budget, controller or image"
                self._replace_move(replace(move, reason=why))
                await self._moves.withdraw(move.job, move.task)
                continue
            after = update_move(move, self._task_now(move), now, self._settings.patience_s)
            if after is not move:
                await self._save_move(after)

    def _task_now(self, move: MoveView) -> TaskNow:
        moves, job, task = self._moves, move.job, move.task
        record = self._jobs.find(job)
        return TaskNow(
            serves_on=moves.serves_on(job, task),
            ordered_to=moves.moving(job, task),
            has_begun=moves.has_begun(job, task),
            exists=record is not None and any(t.index == task for t in record.tasks),
        )

    async def _begin_moves(self) -> None:
        if self._plan is None or self._hold_reason():
            return
        if self._plan.swaps and not self._open_moves():
            wanted, self._plan = self._plan.swaps, replace(self._plan, swaps=[])
            await self.swaps.begin(wanted)
        for move in next_moves(self._plan.moves, self._settings.moves_at_once):
            now = self._runtime.date()
            why = self._objection(move)
            if why:
                await self._save_move(with_state(move, MoveState.WITHDRAWN, now, why))
                continue
            if self._limit.take(self._runtime.now()) > 0:
                return
            reason = f"{move.why}; twinectl rebalance explain {move.id}"
            if await self._moves.begin(move.job, move.task, move.to_machine, reason):
                self._replace_move(with_state(move, MoveState.WAITING, now))
            else:
                why = "its job has another operation"
                await self._save_move(with_state(move, MoveState.WITHDRAWN, now, why))

    def _objection(self, move: MoveView) -> str:
        """Return why a planned move must not begin; empty: it may begin."""
        claims = self._places.claims_of(move.job)
        claim = claims.get(move.task) if claims is not None else None
        if claim is None or claim.machine.name != move.from_machine:
            return f"the task is no longer on {move.from_machine}"
        target = self._places.owner(claim.machine.pool).machines.get(move.to_machine)
        if target is None or target.pool not in (FREE, claim.machine.pool):
            return f"{move.to_machine} no longer belongs to the entitlement"
        terms = self.planner.terms(move.job)
        if terms is None or not terms.movable(move.task):
            return "its job has another operation"
        if judge(claim.demand, target, target):
            return f"{move.to_machine} no longer has room"
        if move.gain > move.price and not self._still_gains(claim, target, move.power_gain):
            return "the move no longer has a gain"
        return ""

    def _still_gains(self, claim: Claim, target: Machine, power_gain: float) -> bool:
        """Return whether a move still gains more than its price; its power gain is the plan's."""
        limits = self.planner.limits.get(claim.machine.pool)
        if limits is None:
            return True
        source = self._use_of(claim.machine, limits)
        load = self._load_of(claim)
        price = self._settings.move_price - power_gain
        return still_gains(source, self._use_of(target, limits), load, self._cost, price)

    def _use_of(self, machine: Machine, limits: list[float]) -> MachineUse:
        used = used_on(machine, self._load_of, self._places.claims_of)
        return MachineUse(used, sizes_of(machine), limits)

    def _load_of(self, claim: Claim) -> Load:
        for holder in claim.machine.jobs:
            claims = self._places.claims_of(holder.job)
            if claims is not None and claims.get(claim.task) == claim:
                known = self.watch.measured(holder.job, [claim.task])[0]
                return known or claimed_load(claim.demand, claim.machine)
        return claimed_load(claim.demand, claim.machine)

    # -- stored state

    def _find_move(self, name: str) -> MoveView:
        moves = (*self._moves_of_plan(), *self.records.state.history)
        found = next((move for move in moves if move.id == name), None)
        if found is None:
            raise NotFound(f"there is no move {name!r}", hint="twinectl rebalance history")
        return found

    def _replace_move(self, move: MoveView) -> None:
        assert self._plan is not None
        moves = [move if known.id == move.id else known for known in self._plan.moves]
        self._plan = replace(self._plan, moves=moves)

    async def _save_move(self, move: MoveView) -> None:
        """Replace a move in the plan; if it has ended, also store it in the history."""
        self._replace_move(move)
        if move.state in OPEN:
            return
        self.counts[move.state] += 1
        await self.records.add_ended(move)
        fields = {"job": move.job, "task": move.task, "state": move.state, "reason": move.reason}
        log.info("move ended", extra=fields)

    # -- for users

    def status(self) -> RebalanceStatus:
        """Return the present state and plan."""
        state, now = self.records.state, self._runtime.now()
        ended = [move.state for move in state.history]
        return RebalanceStatus(
            mode=self._settings.mode,
            paused=bool(state.paused_by),
            paused_by=state.paused_by,
            paused_why=state.paused_why,
            holding="" if self._settings.mode is RebalanceMode.OFF else self._hold_reason(),
            error=self._error,
            next_plan_s=None if self._due_at is None else max(0.0, self._due_at - now),
            plan=self._plan,
            gap=self._gaps[-1] if self._gaps else None,
            measured=len(self.watch.loads),
            swaps=self.swaps.under_way(),
            done=ended.count(MoveState.DONE),
            withdrawn=ended.count(MoveState.WITHDRAWN),
            failed=ended.count(MoveState.FAILED),
        )

    def alarm(self) -> str:
        """Return the alarm for operators; empty: there is none."""
        most = self._settings.gap_alarm
        if len(self._gaps) == GAPS and min(self._gaps) > most:
            return (
                f"rebalancing: {GAPS} plans in a row gain less than {1 - most:.0%} of the "
                "possible gain: rules of jobs or full machines keep tasks in place"
            )
        return ""

    def history(self) -> RebalanceHistory:
        """Return the moves and exchanges that ended, the newest first."""
        open_ = self.swaps.under_way()
        ended = [swap for swap in self.swaps.all() if swap not in open_]
        return RebalanceHistory(moves=self.records.state.history[::-1], swaps=ended[::-1])

    def explain(self, name: str) -> MoveExplanation:
        """Return one move or exchange as text; raises `NotFound`."""
        known = [*self.swaps.all(), *(self._plan.swaps if self._plan is not None else [])]
        for swap in known:
            if swap.id == name:
                lines = explain_swap(swap, self._runtime.date())
                return MoveExplanation(swap=swap, lines=lines)
        move = self._find_move(name)
        return MoveExplanation(move=move, lines=explain_move(move, self._runtime.date()))

    async def pause(self, request: PauseRequest, by: str) -> RebalanceStatus:
        """Begin no more moves, also after a restart; waiting moves are withdrawn."""
        await self.records.change(
            lambda state: replace(state, paused_by=by, paused_why=request.reason)
        )
        log.warning("paused", extra={"by": by, "reason": request.reason})
        return self.status()

    async def resume(self) -> RebalanceStatus:
        """End the pause."""
        await self.records.change(lambda state: replace(state, paused_by="", paused_why=""))
        return self.status()
