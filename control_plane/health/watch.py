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
    """Return whether a host reported that it will shut down, and not that it is back."""
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
    """The slot of time of its next look."""
    standing: Standing | None = None
    down_at: float | None = None
    """When it was declared down, or when this process learned it; None: it is not down."""
    back_at: float | None = None
    """Since when it answers although it is down."""
    failures: Failures = NO_FAILURES
    held: Held | None = None
    confirmed: str = ""
    """The source that reported it down, and why: no part's delay applies. Ends when it answers."""
    is_marked: bool = False
    """Its mark is being written."""
    postponed_until: float = 0.0
    """Until then it may follow the others of a part that looked cut off and comes back."""
    joined_until: float = 0.0
    away_until: float = 0.0
    plan: str = ""
    """Id of the planned reboot that `away_until` is about."""

    def stands(self, standing: Standing | None) -> None:
        """Count the machine with its new standing in its parts."""
        if standing is not self.standing:
            self.rack.moved(self.standing, standing)
            self.standing = standing

    @property
    def is_plain(self) -> bool:
        """Return whether only an answer is expected of it."""
        return self.standing is Standing.WELL and self.held is None and not self.confirmed

    @property
    def is_unasked(self) -> bool:
        """Return whether this process has not called its agent yet: a large region takes time."""
        return self.observation.asked_since is None

    def last_at(self, anew_at: float) -> float:
        """Return since when there was no sign of life; before `anew_at` silence does not count."""
        heard_at, asked_at = self.observation.heard_at, self.observation.asked_since
        since = self.since if self.since > anew_at else anew_at
        if asked_at is not None and asked_at > since:
            since = asked_at
        return since if heard_at is None or heard_at < since else heard_at

    def silent_s(self, now: float, anew_at: float) -> float:
        """Return how long there was no sign of life; before `anew_at` silence does not count."""
        return 0.0 if self.is_unasked else now - self.last_at(anew_at)

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
        """Return the possible excuses for its silence."""
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
