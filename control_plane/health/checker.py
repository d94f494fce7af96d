"""Declares machines down that were silent for too long, and up when they answer again.

Each machine has one deadline, in a slot of half a second. At the deadline the checker reads the
machine's last sign of life and usually moves the deadline, so a machine that answers costs almost
nothing. Each time the checker compares the record with the observation. So it repeats the write of
a new state until the store has accepted it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from control_plane.agents.polled import CONNECT_S
from control_plane.agents.pool import AgentPool
from control_plane.agents.region import Region
from control_plane.api.health import HeldBack
from control_plane.api.limits import LimitName
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.api.settings import SchedulerSettings
from control_plane.broker.core.unavailability import failures
from control_plane.health.core.excuses import GracePeriods, excuse
from control_plane.health.core.parts import Level, Parts, Standing
from control_plane.health.core.trust import (
    TrustRules,
    counted_failures,
    failures_from_ages,
    probation_s,
    with_failure,
)
from control_plane.health.core.verdict import Brakes, Held, verdict
from control_plane.health.follower import Follower
from control_plane.health.held import HeldMachines
from control_plane.health.marker import HealthMarks, Marker
from control_plane.health.watch import Watch, is_leaving
from control_plane.runtime.runtime import TICK_S
from control_plane.runtime.table import ignore
from wire.errors import Conflict

log = logging.getLogger(__name__)
_RECHECK_S = 1.0
"""Interval between checks of a silent machine."""
LEAVING = "its host announced that it goes down"
_CHECKPOINT_EVERY = 64
"""Machines that are checked between two checkpoints."""


class HealthChecker:
    """Keeps the broker's records of failed machines current."""

    def __init__(self, region: Region, pool: AgentPool, marks: HealthMarks) -> None:
        """`marks` records the verdicts."""
        self._broker, self._observations = region.broker, region.observations
        self._settings, self._runtime = region.settings, region.runtime
        self._follows = region.follows
        self._follower = Follower(region, pool)
        self.restored = self._follower.restored
        self._marker = Marker(marks, self._restart_silences)
        self._brakes, self._grace_periods, self._trust_rules = _policies(region.settings)
        answers_lag_s = region.settings.poll_wait_s + TICK_S
        down_after_s = region.settings.down_after_s
        self._suspect_after_s = max(down_after_s / 2, down_after_s - answers_lag_s)
        """Silence after which a machine counts as lost in its parts. It is less than
        `down_after_s`: machines that are cut off together reach that limit one after another, and
        the first must not look like a single loss."""
        self._parts = Parts()
        self._watches: dict[str, Watch] = {}
        self._slots: dict[int, list[Watch]] = {}
        """Machines by the time slot (`TICK_S` long) of their next check."""
        self._next_slot = 0
        self.held = HeldMachines()
        self._limit = region.limits.of(
            LimitName.MARK_DOWN, region.settings.mark_down_per_s, region.settings.mark_down_burst
        )
        self._counted_from = float("-inf")
        region.broker.listen(self._record_changed, loaded=ignore)
        region.observations.listen(self._observation_changed)

    async def run(self) -> None:
        """Follow all machines and judge their silence until cancelled."""
        self._next_slot = int(self._runtime.now() / TICK_S)
        stop_listening = self._runtime.on_pause(
            lambda s: self._restart_silences(f"this process was paused for {s:.0f} s")
        )
        try:
            async with asyncio.TaskGroup() as group:
                for name in self._broker.table:
                    record = self._broker.table.find(name)
                    if record is not None and self._is_ours(record) and name not in self._watches:
                        self._start_watching(record)
                    await self._runtime.checkpoint()
                marks = self._marker.run(
                    self._is_still_silent, self._answers_again, self._marks_written
                )
                self._runtime.spawn_in(group, "health marks", marks)
                group.create_task(self._follower.run())
                while True:
                    await self._runtime.sleep(TICK_S)
                    await self._check_due()
        finally:
            stop_listening()

    # -- queries

    @property
    def followed_count(self) -> int:
        """Return how many machines are watched."""
        return len(self._watches)

    def held_reason(self, machine: str) -> str:
        """Return why a machine's silence, or its answers, have not changed its state."""
        watch, record = self._watches.get(machine), self._broker.table.find(machine)
        if watch is None or watch.held is None:
            return LEAVING if is_leaving(record) else ""
        return watch.held.reason

    def held_back(self) -> list[HeldBack]:
        """Return all machines without a verdict yet, by name, and why."""
        return self.held.views(self._runtime.now(), self._counted_from)

    def confirm_down(self, machines: Iterable[str], why: str) -> list[str]:
        """Declare silent machines down even if they are held back; return which.

        Machines that answer, or are down, are left out; `Conflict` if that leaves none.
        """
        now = self._runtime.now()
        silent = [
            watch
            for name in sorted(set(machines))
            if (watch := self._watches.get(name)) is not None
            and watch.down_at is None
            and watch.silent_s(now, self._counted_from) >= self._suspect_after_s
        ]
        if not silent:
            raise Conflict(
                "nothing to confirm: each of these machines answers, or is down already",
                hint="twinectl machine held-back; drain machines that answer",
            )
        for watch in silent:
            watch.confirmed = why
            self._schedule(watch, now)
        log.warning("machines confirmed down", extra={"machines": len(silent), "reason": why})
        return [watch.machine for watch in silent]

    # -- events

    def _restart_silences(self, why: str) -> None:
        """Count silence from now on only: this process, not the machines, may have been cut off."""
        self._counted_from = self._runtime.now()
        log.warning("the silence of all machines is counted from now on", extra={"reason": why})

    def _record_changed(
        self, name: str, before: MachineRecord | None, after: MachineRecord | None
    ) -> None:
        watch = self._watches.get(name)
        if after is None or not self._is_ours(after):
            if watch is not None:
                self._forget(watch)
            return
        if watch is None:
            watch = self._start_watching(after)
        now = self._runtime.now()
        if before is None or before.joined_at != after.joined_at:
            watch.joined_until = now + self._settings.join_grace_s
        if before is not None and before.location != after.location:
            standing = watch.standing
            watch.set_standing(None)
            watch.rack = self._parts.rack(after.location)
            watch.set_standing(standing)
        watch.planned(after, now, self._runtime.date())
        if (after.state is MachineState.DOWN) is not (watch.down_at is not None):
            self._state_changed(watch, after.state, now)

    def _is_ours(self, record: MachineRecord) -> bool:
        """Return whether a machine has joined, and this process follows it."""
        return record.facts is not None and self._follows(record.entitlement)

    def update_following(self, name: str) -> None:
        """Start or stop following a machine whose shard may have moved to another process."""
        record = self._broker.table.find(name)
        self._record_changed(name, record, record)
        self._follower.update_following(name)

    def _state_changed(self, watch: Watch, state: MachineState, now: float) -> None:
        if state is MachineState.DOWN:
            watch.down_at, watch.back_at = now, None
            watch.failures = with_failure(watch.failures, now, self._trust_rules)
            watch.set_standing(Standing.LOST)
        else:
            watch.down_at = watch.back_at = None
            watch.confirmed = ""
            watch.set_standing(Standing.WELL)
        self.held.put(watch, None)
        self._schedule(watch, now)
        asyncio.get_running_loop().call_soon(self._observations.changed, watch.machine)

    def _observation_changed(self, name: str) -> None:
        watch = self._watches.get(name)
        if watch is None or watch.down_at is None:
            return
        if not watch.observation.answering:
            watch.back_at = None
        elif watch.back_at is None:
            watch.back_at = self._runtime.now()
            self._check_down(watch, watch.back_at)

    def _start_watching(self, record: MachineRecord) -> Watch:
        """Begin to watch a machine, in the state of its record."""
        now = self._runtime.now()
        rack = self._parts.rack(record.location)
        observation = self._observations.observation(record.machine)
        watch = self._watches[record.machine] = Watch(record.machine, rack, observation, now)
        down = record.state is MachineState.DOWN
        watch.down_at = now if down else None
        ages_s = (self._runtime.date() - start for start in failures(record))
        watch.failures = failures_from_ages(ages_s, now, self._trust_rules)
        watch.planned(record, now, self._runtime.date())
        watch.set_standing(Standing.LOST if down else Standing.WELL)
        self._schedule(watch, now + self._suspect_after_s)
        return watch

    def _forget(self, watch: Watch) -> None:
        self.held.put(watch, None)
        watch.set_standing(None)
        watch.due_in = 0  # its entry in a slot is void
        del self._watches[watch.machine]

    # -- deadlines

    def _schedule(self, watch: Watch, when: float) -> None:
        slot = max(int(when / TICK_S) + 1, self._next_slot)
        watch.due_in = slot
        in_slot = self._slots.get(slot)
        if in_slot is None:
            self._slots[slot] = [watch]
        else:
            in_slot.append(watch)

    async def _check_due(self) -> None:
        """Check all machines whose deadline has come."""
        self._runtime.check_clocks()  # finds own pauses before any verdict
        due, checked = list[Watch](), 0
        while self._next_slot <= self._runtime.now() / TICK_S:
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            now = self._runtime.now()
            for watch in self._slots.pop(slot, ()):
                checked += 1
                if checked % _CHECKPOINT_EVERY == 0:
                    await self._runtime.checkpoint()
                if watch.due_in != slot:
                    continue  # the watch was moved to another slot since
                if watch.down_at is not None:
                    self._check_down(watch, now)
                elif self._check_up(watch, now):
                    due.append(watch)
        for number, watch in enumerate(due):
            if self._watches.get(watch.machine) is watch:  # it may have been removed meanwhile
                self._give_verdict(watch)
            if number % _CHECKPOINT_EVERY == 0:
                await self._runtime.checkpoint()

    def _check_up(self, watch: Watch, now: float) -> bool:
        """Check a machine that is up; return whether its silence needs a verdict."""
        if watch.is_not_called:
            self._schedule(watch, now + self._suspect_after_s)
            return False
        silent_since = watch.silent_since(self._counted_from)
        silent_s = now - silent_since
        if silent_s < self._suspect_after_s:
            if watch.is_normal:  # almost always
                self._schedule(watch, silent_since + self._suspect_after_s)
                return False
            watch.confirmed = ""
            watch.set_standing(Standing.WELL)
            self.held.put(watch, None)
            self._schedule(watch, now - silent_s + self._suspect_after_s)
            return False
        excused = None
        if not watch.confirmed:
            signs = watch.signs(self._broker.table.find(watch.machine), silent_s)
            excused = excuse(signs, now, self._grace_periods)
            if excused is None and signs.is_leaving:
                watch.confirmed = LEAVING  # the host reported it, so its part is not cut off
        is_due = silent_s >= self._settings.down_after_s or bool(watch.confirmed)
        if excused is not None:
            watch.set_standing(Standing.WELL)
            self.held.put(watch, excused if is_due else None)
            self._schedule(watch, now + _RECHECK_S)
            return False
        watch.set_standing(Standing.LOST)
        if not is_due:
            self._schedule(watch, now - silent_s + self._settings.down_after_s)
        return is_due

    def _give_verdict(self, watch: Watch) -> None:
        """Mark a silent machine down, or hold it back and check again soon."""
        now = self._runtime.now()
        silent_s = watch.silent_s(now, self._counted_from)
        held = None if watch.confirmed else self._held_back(watch, silent_s, now)
        if held is None and not watch.is_marked and not watch.confirmed:
            wait_s = self._limit.take(now)
            if wait_s > 0:
                held = Held("the rate limit holds: too many machines went down", wait_s)
        self.held.put(watch, held)
        if held is None and not watch.is_marked:
            watch.is_marked = True
            reason = f"its agent did not answer for {silent_s:.0f} s"
            self._marker.down(watch.machine, "; ".join(filter(None, (reason, watch.confirmed))))
        self._schedule(watch, now + _RECHECK_S)

    def _held_back(self, watch: Watch, silent_s: float, now: float) -> Held | None:
        """Return why a verdict is postponed.

        When most machines of a part have come back, that part no longer seems cut off. Its other
        machines get at most `down_after_s` more.
        """
        held = verdict(watch.rack, silent_s, self._brakes)
        if held is not None:
            watch.postponed_until = now + min(held.left_s, self._settings.down_after_s)
        elif now < watch.postponed_until:
            reason = "most machines of its part, which seemed cut off, came back; it may follow"
            held = Held(reason, watch.postponed_until - now)
        return held

    def _check_down(self, watch: Watch, now: float) -> None:
        """Mark a machine that is down up again, once it has answered for long enough."""
        assert watch.down_at is not None
        if now - watch.down_at >= self._settings.brake_window_s:
            watch.set_standing(Standing.GONE)
        if not watch.observation.answering:
            watch.back_at = None
            self.held.put(watch, None)
            self._schedule(watch, now + self._settings.down_after_s)
            return
        watch.back_at = now if watch.back_at is None else watch.back_at
        left_s = watch.back_at + probation_s(watch.failures, now, self._trust_rules) - now
        if left_s > 0:
            count = counted_failures(watch.failures, now, self._trust_rules)
            reason = (
                f"it was down {count} times recently and must answer for a while before it is up"
            )
            self.held.put(watch, Held(reason, left_s))
            self._schedule(watch, now + min(left_s, self._settings.down_after_s))
            return
        if not watch.is_marked:
            watch.is_marked = True
            self._marker.up(watch.machine)
        self._schedule(watch, now + _RECHECK_S)

    # -- marks

    def _is_still_silent(self, name: str) -> bool:
        watch = self._watches.get(name)
        if watch is None or watch.down_at is not None:
            return False
        least_s = self._suspect_after_s if watch.confirmed else self._settings.down_after_s
        return watch.silent_s(self._runtime.now(), self._counted_from) >= least_s

    def _answers_again(self, name: str) -> bool:
        watch = self._watches.get(name)
        return watch is not None and watch.back_at is not None and watch.observation.answering

    def _marks_written(self, names: list[str]) -> None:
        for name in names:
            if name in self._watches:
                self._watches[name].is_marked = False


def _policies(settings: SchedulerSettings) -> tuple[Brakes, GracePeriods, TrustRules]:
    small, large = settings.domain_grace_s, settings.partition_grace_s
    delays = {Level.RACK: small, Level.MSB: small, Level.DATACENTER: large, Level.REGION: large}
    alive_s = settings.poll_patience_s + CONNECT_S + settings.poll_retry_s + _RECHECK_S
    return (
        Brakes(settings.brake_share, delays),
        GracePeriods(settings.reboot_grace_s, settings.agent_grace_s, alive_s),
        TrustRules(settings.flap_trust_s, settings.flap_trust_max_s, settings.flap_forget_s),
    )
