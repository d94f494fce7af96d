"""Stores the ReBalancer's records: the present plan, a pause, the history, the times of moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from control_plane.api.rebalancing import MoveState, MoveView, RebalancePlan, RebalanceRecord
from control_plane.runtime.table import Table
from control_plane.store import Store
from control_plane.store.quarantine import quarantined
from control_plane.store.records import REBALANCE

_HISTORY = 200
_STATE, _MOVED, _PLAN = "state", "moved/", "plan"
_LOST = "its stored state is damaged, and a pause may be lost: `twinectl rebalance resume`"
KEPT = 1_000
"""Moves of a plan that are stored, 350 bytes each. A later plan finds the others again."""


class RebalanceRecords:
    """Reads and writes the ReBalancer's records."""

    def __init__(self, store: Store) -> None:
        self.table = Table(store, REBALANCE, RebalanceRecord, "rebalance record")
        self._default_state = RebalanceRecord()
        """The state until one is stored."""

    async def load(self) -> None:
        """Read all records; a state that was set aside as damaged counts as a pause."""
        await self.table.load()
        self._default_state = RebalanceRecord(plans=self._last_number())
        if REBALANCE + _STATE in await quarantined(self.table.store):
            why = {"paused_by": "the control plane", "paused_why": _LOST}
            self._default_state = replace(self._default_state, **why)

    def _last_number(self) -> int:
        """Return the highest number of a plan in any record."""
        numbers = [0]
        for record in self.table.records():
            numbers += [record.plans, record.plan.number if record.plan is not None else 0]
            numbers += [int(swap.id.removeprefix("s").partition(".")[0]) for swap in record.swaps]
        return max(numbers)

    @property
    def state(self) -> RebalanceRecord:
        """The pause, the number of plans, and the history of moves."""
        return self.table.find(_STATE) or self._default_state

    @property
    def plan(self) -> RebalancePlan | None:
        """The plan that was stored last."""
        known = self.table.find(_PLAN)
        return known.plan if known is not None else None

    def moved_at(self, job: str) -> Mapping[int, float]:
        """Return when tasks of a job were moved, in seconds since 1970."""
        known = self.table.find(_MOVED + job)
        return known.moved if known is not None else {}

    async def change(self, change: Callable[[RebalanceRecord], RebalanceRecord]) -> None:
        """Change the state; a pause and the end of a move may come at the same moment."""
        async with self.table.lock(_STATE):
            await self.table.commit(_STATE, change(self.state))

    async def put_plan(self, plan: RebalancePlan | None) -> None:
        """Store a plan with its first moves; None, or no moves: no plan is stored.

        The number of plans is stored too, so that none is used twice if the state is damaged.
        """
        kept = None
        if plan is not None and plan.moves:
            kept = replace(plan, moves=plan.moves[:KEPT], places=[])
        await self._write(_PLAN, RebalanceRecord(plans=self.state.plans, plan=kept))

    async def add_ended(self, move: MoveView) -> None:
        """Add a move to the history, and the time of the move if its task moved."""
        await self.change(lambda state: replace(state, history=[*state.history, move][-_HISTORY:]))
        if move.state in (MoveState.DONE, MoveState.FAILED):
            moved = {**self.moved_at(move.job), move.task: move.at}
            await self._write(_MOVED + move.job, RebalanceRecord(moved=moved))

    async def forget_moves(self, oldest: float, exists: Callable[[str], bool]) -> None:
        """Delete the times of moves before `oldest`, and those of jobs that no longer exist."""
        for name in [n for n in self.table if n.startswith(_MOVED)]:
            known = self.table.get(name)
            kept = {task: at for task, at in known.moved.items() if at > oldest}
            if not kept or not exists(name.removeprefix(_MOVED)):
                await self._write(name, None)
            elif kept != known.moved:
                await self._write(name, replace(known, moved=kept))

    async def _write(self, name: str, record: RebalanceRecord | None) -> None:
        async with self.table.lock(name):
            await self.table.commit(name, record)
