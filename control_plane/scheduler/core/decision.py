"""What a decision about a job is made of: what is seen, what is found, what comes of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from control_plane.agents.core.seen import View
from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.weighted_spread import OVER_MSBS, Even
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.api.operations import JobEvent
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.operations import Ledger
from control_plane.scheduler.core.rebalance_moves import rebalanced
from control_plane.scheduler.core.release import runs_next
from control_plane.task_control.core.talk import Heard


@dataclass(frozen=True, slots=True)
class Seen:
    """What a decision is based on, besides the record."""

    view: View
    now: Moment
    claims: Iterable[Claim] = ()
    """The job's, which say where its tasks stand."""
    evened: Even | None = OVER_MSBS
    """Over what the job is spread; None: it is not."""
    repairs: tuple[int, ...] = ()
    """Tasks whose move makes the spread more even."""
    heard: Heard = field(default_factory=Heard)
    """What the job's controller said last, if it has one."""
    held_back: Mapping[str, str] = field(default_factory=dict)
    """Machines near which so much is lost that what can wait does → why."""
    surge_left: int | None = None
    """Extra tasks that the entitlement's jobs leave to this one; None: as many as it says."""
    capped_moves: int | None = None
    """Tasks that may begin to leave machines whose power is capped now; None: any number."""


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of the places of tasks that are to be updated or moved."""

    ready: frozenset[int] = frozenset()
    """They have a place, and their image is there."""
    without_room: frozenset[int] = frozenset()
    """No machine has a place for them."""
    detail: str = ""
    """Why others are not ready."""


@dataclass(slots=True)
class Room:
    """How many tasks may still be taken down."""

    serving: int = 0
    """Of those that serve …"""
    broken: int = 0
    """… and of those that do not …"""
    updates: int | None = None
    """… and for the newest version, of either; None: as many …"""
    paced: int | None = None
    """… and for the newest version, of those that serve; None: as many."""

    def take(self, *, serves: bool, updates: bool) -> bool:
        """Take one, if there is room for it."""
        if updates and (
            self.updates == 0 or (serves and self.paced is not None and self.paced < 1)
        ):
            return False
        if (self.serving if serves else self.broken) <= 0:
            return False
        if serves:
            self.serving -= 1
        else:
            self.broken -= 1
        if updates and self.updates is not None:
            self.updates -= 1
        if updates and serves and self.paced is not None:
            self.paced -= 1
        return True


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
    room: Room = field(default_factory=lambda: Room())
    held: list[int] = field(default_factory=list)
    """Tasks that serve and to which nothing is done: too much is lost where they are."""
    waits_for_surge: bool = False
    """Others have all extra tasks that the jobs of the entitlement may have at once."""
    capped: int = 0
    """Tasks that began to leave machines whose power is capped."""

    @property
    def events(self) -> list[JobEvent]:
        """Return what the log has to say of this decision."""
        return self.ledger.events

    def may_go_unproved(self, index: int, repairs: Collection[int]) -> bool:
        """Return whether a task goes to a machine that has not proved the host profile yet.

        One that serves well where it is, and moves for a better use of machines, does not.
        """
        return index not in repairs and index not in rebalanced(self.record)

    def runs_next(self) -> dict[int, JobSpec]:
        """Return what each of `chosen` runs once it was taken down."""
        known = {task.index: task for task in self.record.tasks}
        return {
            index: self.record.specs.get(runs_next(self.record, known[index]), self.record.spec)
            for index in self.chosen
        }

    def took(self, record: JobRecord) -> None:
        """Go on with a record in which things happened to tasks."""
        self.record = self.ledger.follow(self.record, record)
