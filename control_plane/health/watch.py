"""The health checker's state of one machine."""

from __future__ import annotations

from dataclasses import dataclass

from agent.api import ProfileState
from control_plane.agents.observations import Observation
from control_plane.api.machines import EventKind, MachineRecord
from control_plane.broker.core.unavailability import open_event
from control_plane.health.core.excuses import Signs
from control_plane.health.core.parts import Part, Standing
from control_plane.health.core.trust import NO_FAILURES, Failures
from control_plane.health.core.verdict import Held

_SWITCHING = (ProfileState.APPLYING, ProfileState.PENDING_REBOOT)


def is_leaving(record: MachineRecord | None) -> bool:
    """Return whether a host reported that it will shut down, and has not come back since."""
    return record is not None and record.facts is not None and record.facts.leaving


@dataclass(slots=True, eq=False)
class Watch:
    """One machine that has joined. Moments are those of `Runtime.now()`."""

    machine: str
    rack: Part
    observation: Observation
    since: float
    """When this process began to call its agent."""
    due_in: int = 0
    """The time slot of its next check."""
    standing: Standing | None = None
    down_at: float | None = None
    """When it was declared down, or when this process read that it is; None if it is up."""
    back_at: float | None = None
    """Since when it answers again, while it is recorded as down."""
    failures: Failures = NO_FAILURES
    held: Held | None = None
    confirmed: str = ""
    """The source that reported it down, and why: then no delay of a part applies. Cleared when the
    machine answers."""
    is_marked: bool = False
    """Its mark is being written."""
    postponed_until: float = 0.0
    """Until then it may come back with the others of a part that seemed cut off."""
    joined_until: float = 0.0
    away_until: float = 0.0
    plan: str = ""
    """Id of the planned reboot that `away_until` belongs to."""

    def set_standing(self, standing: Standing | None) -> None:
        """Change the standing of the machine, and the counts of its parts."""
        if standing is not self.standing:
            self.rack.moved(self.standing, standing)
            self.standing = standing

    @property
    def is_plain(self) -> bool:
        """Return whether the machine is well: not lost, held back or confirmed down."""
        return self.standing is Standing.WELL and self.held is None and not self.confirmed

    @property
    def is_unasked(self) -> bool:
        """Return whether this process has not called its agent yet, as after a start."""
        return self.observation.asked_since is None

    def last_at(self, counted_from: float) -> float:
        """Return the last sign of life; silence before `counted_from` does not count."""
        last_contact, asked_at = self.observation.last_contact_at, self.observation.asked_since
        since = self.since if self.since > counted_from else counted_from
        if asked_at is not None and asked_at > since:
            since = asked_at
        return since if last_contact is None or last_contact < since else last_contact

    def silent_s(self, now: float, counted_from: float) -> float:
        """Return the seconds since `last_at`; 0 if its agent was not called yet."""
        return 0.0 if self.is_unasked else now - self.last_at(counted_from)

    def planned(self, record: MachineRecord, now: float, wall: float) -> None:
        """Record how long the machine is planned to be away.

        The remaining time is measured once, on the monotonic clock.
        """
        event = open_event(record, EventKind.PLANNED)
        if event is None:
            self.plan, self.away_until = "", 0.0
        elif event.event_id != self.plan:
            self.plan = event.event_id
            if event.deadline is None:
                self.away_until = float("inf")
            else:
                whole_s = event.deadline - event.start
                self.away_until = now + max(0.0, min(event.deadline - wall, whole_s))

    def signs(self, record: MachineRecord | None, silent_s: float) -> Signs:
        """Return the signs that may excuse its silence."""
        return Signs(
            silent_s=silent_s,
            joined_until=self.joined_until,
            away_until=self.away_until,
            is_switching=record is not None
            and bool(record.entitlement)
            and record.profile_state in _SWITCHING,
            alive_at=self.observation.alive_at,
            is_leaving=is_leaving(record),
        )
