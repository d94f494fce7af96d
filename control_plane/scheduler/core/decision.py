"""What a decision about a job is made of: what is seen, what is found, what comes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from control_plane.agents.core.seen import View
from control_plane.allocator.core.claims import Claim
from control_plane.api.jobs import JobRecord
from control_plane.api.operations import JobEvent
from control_plane.api.policy import Property
from control_plane.scheduler.core.moment import Moment
from control_plane.scheduler.core.operations import Ledger
from control_plane.task_control.core.talk import Heard


@dataclass(frozen=True, slots=True)
class Seen:
    """What a decision is based on, besides the record."""

    view: View
    now: Moment
    claims: Iterable[Claim] = ()
    """The job's, which say where its tasks stand."""
    evened: Property | None = Property.MSB
    """Over what the job is spread; None: it is not."""
    repairs: tuple[int, ...] = ()
    """Tasks whose move makes the spread more even."""
    heard: Heard = field(default_factory=Heard)
    """What the job's controller said last, if it has one."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of the places of tasks that are to be updated or moved."""

    ready: frozenset[int] = frozenset()
    """They have a place, and their image is there."""
    detail: str = ""
    """Why others are not."""


@dataclass(slots=True)
class Decision:
    """A job as it will be, and what comes of it."""

    record: JobRecord
    ledger: Ledger
    chosen: tuple[int, ...] = ()
    """Tasks whose operations may begin now, as far as the budget goes, once they have a place."""
    overdue: tuple[int, ...] = ()
    """Tasks that must leave now, whatever stands against it."""
    detail: str = ""
    """Why nothing goes on, if so."""
    moving: frozenset[int] = field(default=frozenset())
    """Those of `chosen` that need another machine."""
    serving: frozenset[int] = field(default=frozenset())
    """Tasks that may not be missed: those of `chosen` go only within the budget."""
    budget: int = 0
    """How many of `serving` may go …"""
    slots: int = 0
    """… and how many that do not serve may be replaced."""

    @property
    def events(self) -> list[JobEvent]:
        """Return what the log has to say of this decision."""
        return self.ledger.events

    def took(self, record: JobRecord) -> None:
        """Go on with a record in which things happened to tasks."""
        self.record = self.ledger.follow(self.record, record)
