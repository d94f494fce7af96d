"""What the health checker knows of one machine."""

from __future__ import annotations

from dataclasses import dataclass

from agent.api import ProfileState
from control_plane.agents.observations import Observation
from control_plane.api.machines import EventKind, MachineRecord
from control_plane.broker.core.unavailability import open_event
from control_plane.health.core.excuses import SilenceSigns
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
    """Number of the time slot (`TICK_S` long) of its next check; 0: none."""
    standing: Standing | None = None
    down_at: float | None = None
    """When it was declared down, or when this process read that it is; None if it is up."""
    back_at: float | None = None
    """Since when it answers again, while it is recorded as down."""
    failures: Failures = NO_FAILURES
    held: Held | None = None
    confirmed: str = ""
    """Which source reported it down, and why: then no delay of its parts applies. Cleared when the
    machine answers."""
    is_marked: bool = False
    """Whether its new state is being written."""
    postponed_until: float = 0.0
    """Until then it may come back, as the others did of a part that seemed cut off."""
    joined_until: float = 0.0
    """Until then the silence of a machine that has just joined is excused."""
    away_until: float = 0.0
    """Until then the silence of a machine with a planned reboot is excused."""
    plan: str = ""
    """Id of the event of this planned reboot."""

    def set_standing(self, standing: Standing | None) -> None:
        """Change the standing of the machine, and the counts of its parts."""
        if standing is not self.standing:
            self.rack.count_change(self.standing, standing)
            self.standing = standing

    @property
    def is_normal(self) -> bool:
        """Return whether the machine is neither lost, held back nor confirmed down."""
        return self.standing is Standing.WELL and self.held is None and not self.confirmed

    @property
    def is_not_called(self) -> bool:
        """Return whether this process does not call its agent at present, as after a start."""
        return self.observation.asked_since is None

    def silent_since(self, counted_from: float) -> float:
        """Return when its silence began: at its last sign of life, or later at `counted_from`."""
        last_contact, asked_at = self.observation.last_contact_at, self.observation.asked_since
        since = self.since if self.since > counted_from else counted_from
        if asked_at is not None and asked_at > since:
            since = asked_at
        return since if last_contact is None or last_contact < since else last_contact

    def silent_s(self, now: float, counted_from: float) -> float:
        """Return for how long it has been silent; 0 while this process does not call its agent."""
        return 0.0 if self.is_not_called else now - self.silent_since(counted_from)

    def planned(self, record: MachineRecord, now: float, wall: float) -> None:
        """Record until when a planned reboot excuses silence.

        The remaining time is computed once, and then counted on the monotonic clock: `now` is of
        `Runtime.now()`, `wall` in seconds since 1970.
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

    def signs(self, record: MachineRecord | None, silent_s: float) -> SilenceSigns:
        """Return the signs that may excuse its silence."""
        return SilenceSigns(
            silent_s=silent_s,
            joined_until=self.joined_until,
            away_until=self.away_until,
            is_switching=record is not None
            and bool(record.entitlement)
            and record.profile_state in _SWITCHING,
            alive_at=self.observation.alive_at,
            is_leaving=is_leaving(record),
        )
