"""Carries out exchanges of machines between entitlements: drains both, then hands them over (RE3).

Both machines are announced as unavailable, as for maintenance. So their tasks leave within the
budgets of their jobs, and with the acknowledgement of their controllers. As after any drain, the
empty machines return to the free pool. Then the announcement ends, and each machine is taken for
the other entitlement, whose host profile it gets. After a restart the next step follows from the
stored exchange and the broker's records.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from msgspec.structs import replace

from control_plane.agents.region import Region
from control_plane.api.machines import EventKind, MachineRecord, MachineState
from control_plane.api.rebalancing import RebalanceRecord, SwapState, SwapView
from control_plane.broker.core.assignment import FREE
from control_plane.broker.core.unavailability import of_plan
from control_plane.ops_planner.ports import Announcements
from control_plane.rebalancer.ports import ShardedPlaces
from control_plane.runtime.table import Table
from wire.errors import TwineError

log = logging.getLogger(__name__)
_ENDED = (SwapState.DONE, SwapState.WITHDRAWN, SwapState.FAILED)
_KEY, _PLAN_PREFIX = "swaps", "rebalance-"
_EXCHANGES_KEPT = 50
_HAND_OVER_S = 120.0
"""Time for which a hand-over is retried. After it the machine stays free, since its quota may be
used up."""


class MachineSwaps:
    """Carries out exchanges of machines, one at a time."""

    def __init__(
        self,
        region: Region,
        places: ShardedPlaces,
        drains: Announcements,
        table: Table[RebalanceRecord],
    ) -> None:
        self._settings, self._runtime = region.settings.rebalance, region.runtime
        self._machines, self._find = region.broker.table, region.broker.table.find
        self._places, self._drains, self._table = places, drains, table

    def all(self) -> list[SwapView]:
        """Return the stored exchanges, under way or ended, the oldest first."""
        known = self._table.find(_KEY)
        return known.swaps if known is not None else []

    def under_way(self) -> list[SwapView]:
        """Return the exchanges that have not ended."""
        return [swap for swap in self.all() if swap.state not in _ENDED]

    def keeps(self, machine: str) -> bool:
        """Return whether a machine was just handed over: it stays in its pool without tasks."""
        until = self._runtime.date() - 2 * self._settings.every_s
        return any(
            machine in (swap.one, swap.two) and swap.state is SwapState.DONE and swap.at > until
            for swap in self.all()
        )

    async def begin(self, swaps: Collection[SwapView]) -> None:
        """Begin the first exchange that is still possible, if none is under way.

        A resumed plan has all of its exchanges, so those that began before are skipped.
        """
        if self.under_way():
            return
        begun_before = {swap.id for swap in self.all()}
        for swap in swaps:
            if swap.id in begun_before:
                continue
            one, two = self._find(swap.one), self._find(swap.two)
            if one is None or two is None or not _may_exchange(swap, one, two):
                continue
            try:
                await self._begin_one(swap, one.entitlement, two.entitlement)
            except TwineError as e:  # if it is stored, `follow` announces its machines
                log.warning("exchange did not begin", extra={"swap": swap.id, "reason": str(e)})
            return

    async def _begin_one(self, swap: SwapView, pool_one: str, pool_two: str) -> None:
        """Store an exchange as begun, then announce that its machines become unavailable."""
        now = self._runtime.date()
        begun = replace(
            swap,
            pool_one=pool_one,
            pool_two=pool_two,
            state=SwapState.DRAINING,
            began_at=now,
            at=now,
        )
        await self._save(begun)
        reason = f"exchanged between {pool_one} and {pool_two}: {swap.why}"
        await self._drains.plan_unavailability(
            [swap.one, swap.two], EventKind.MAINTENANCE, reason, plan=_plan_of(swap)
        )
        log.info("exchange of machines began", extra={"one": swap.one, "two": swap.two})

    async def end_unknown(self) -> None:
        """End the announcements of unknown exchanges, whose damaged record was set aside."""
        known = {_plan_of(swap) for swap in self.under_way()}
        for name in list(self._machines):
            await self._runtime.checkpoint()
            record = self._find(name)
            events = () if record is None else record.unavailability
            for plan in {
                e.plan for e in events if e.end is None and _is_plan_of_exchange(e.plan)
            } - known:
                await self._drains.end_plan([name], plan)
                log.warning("drain of an unknown exchange ended", extra={"machine": name})

    async def follow(self, hold_reason: str) -> None:
        """Advance the open exchanges; `hold_reason`: why to withdraw drains, empty: do not."""
        for swap in self.under_way():
            try:
                await self._advance(swap, hold_reason)
            except TwineError as e:
                log.info("exchange waits", extra={"swap": swap.id, "reason": str(e)})

    async def _advance(self, swap: SwapView, hold_reason: str) -> None:
        """Bring one exchange to its next state, if it can be reached now."""
        now = self._runtime.date()
        if swap.state is SwapState.DRAINING:
            records = self._find(swap.one), self._find(swap.two)
            down = [n for n, r in zip((swap.one, swap.two), records, strict=True) if not _is_up(r)]
            why = hold_reason or (f"{down[0]} is down" if down else "")
            if not why and now - swap.began_at > self._settings.swap_patience_s:
                why = "its machines were not empty in time: a budget, a controller or no room"
            if why:
                await self._end(swap, SwapState.WITHDRAWN, why)
            elif not self._is_announced(swap):
                await self._drains.plan_unavailability(
                    [swap.one, swap.two], EventKind.MAINTENANCE, swap.why, plan=_plan_of(swap)
                )
            elif all(r is not None and r.entitlement == FREE for r in records):
                await self._drains.end_plan([swap.one, swap.two], _plan_of(swap))
                await self._save(replace(swap, state=SwapState.HANDING_OVER, at=now))
        elif swap.state is SwapState.HANDING_OVER:
            await self._hand_over(swap, now)

    def _is_announced(self, swap: SwapView) -> bool:
        """Return whether both machines are announced: a restart may have prevented that."""
        records = [r for n in (swap.one, swap.two) if (r := self._find(n)) is not None]
        return all(of_plan(record, _plan_of(swap)) is not None for record in records)

    async def _hand_over(self, swap: SwapView, now: float) -> None:
        """Take each machine for the other entitlement; fail if that takes too long."""
        refused = []
        for machine, pool in ((swap.one, swap.pool_two), (swap.two, swap.pool_one)):
            record = self._find(machine)
            if record is not None and record.entitlement == pool:
                continue
            if record is None or record.entitlement != FREE:
                refused.append(f"{machine} was taken by another entitlement")
            elif not await self._places.of_pool(pool).take(machine, pool):
                refused.append(f"{pool} may not use {machine} now")
        if not refused:
            await self._end(swap, SwapState.DONE, "")
        elif now - swap.at > _HAND_OVER_S:
            await self._end(swap, SwapState.FAILED, "; ".join(refused))

    async def _end(self, swap: SwapView, state: SwapState, reason: str) -> None:
        await self._drains.end_plan([swap.one, swap.two], _plan_of(swap))
        await self._save(replace(swap, state=state, reason=reason, at=self._runtime.date()))
        log.info("exchange of machines ended", extra={"swap": swap.id, "state": state.value})

    async def _save(self, swap: SwapView) -> None:
        others = [known for known in self.all() if known.id != swap.id]
        async with self._table.lock(_KEY):
            await self._table.commit(
                _KEY, RebalanceRecord(swaps=[*others, swap][-_EXCHANGES_KEPT:])
            )


def _plan_of(swap: SwapView) -> str:
    """Return the name of the maintenance plan that drains the machines of an exchange."""
    return f"{_PLAN_PREFIX}{swap.id}"


def _is_plan_of_exchange(plan: str) -> bool:
    """Return whether a plan belongs to an exchange: names of operators' plans have no dot."""
    return plan.startswith(_PLAN_PREFIX) and "." in plan


def _may_exchange(swap: SwapView, one: MachineRecord, two: MachineRecord) -> bool:
    """Return whether two machines are in the entitlements of the plan, up, and not lent.

    Plans of earlier versions do not name the entitlements, which then only have to differ.
    """
    planned, present = (swap.pool_one, swap.pool_two), (one.entitlement, two.entitlement)
    return (
        planned in (present, ("", ""))
        and FREE not in present
        and one.entitlement != two.entitlement
        and all(_is_up(record) and record.loan is None for record in (one, two))
    )


def _is_up(record: MachineRecord | None) -> bool:
    return record is not None and record.state is MachineState.UP
