"""The values of a decision about a job: the observed state, the found places, the result."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from control_plane.agents.core.seen import View
from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.weighted_spread import OVER_MSBS, Even
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.operations import Ledger
from control_plane.scheduler.core.rebalance_moves import rebalanced
from control_plane.scheduler.core.task_versions import runs_next
from control_plane.task_control.core.conversation import ControllerAnswer


@dataclass(frozen=True, slots=True)
class Seen:
    """The input of a decision, besides the record."""

    view: View
    now: Moment
    claims: Iterable[Claim] = ()
    """The job's claims, with the machines of its tasks."""
    evened: Even | None = OVER_MSBS
    """The bins over which the job is spread; None: none."""
    repairs: tuple[int, ...] = ()
    """Tasks whose move makes the spread more even."""
    answer: ControllerAnswer = field(default_factory=ControllerAnswer)
    """The last answer of the job's controller, if it has one."""
    held_back: Mapping[str, str] = field(default_factory=dict)
    """Machine near which much capacity is lost → why operations there wait."""
    surge_left: int | None = None
    """Extra tasks that the entitlement's other jobs leave to this one; None: no shared limit."""
    capped_moves: int | None = None
    """Tasks that may begin to leave power-capped machines now; None: any number."""
    without_room: frozenset[int] = frozenset()
    """Tasks that found no other place when they were chosen last: others go first (BUG-CP63)."""


@dataclass(frozen=True, slots=True)
class Found:
    """The places of tasks that are to be updated or moved."""

    ready: frozenset[int] = frozenset()
    """Tasks that have a place with their image on it."""
    without_room: frozenset[int] = frozenset()
    """Tasks for which no machine has room."""
    detail: str = ""
    """Why other tasks are not ready."""


@dataclass(slots=True)
class Room:
    """How many tasks may still be taken down."""

    serving: int = 0
    """Tasks that serve."""
    broken: int = 0
    """Tasks that do not serve."""
    updates: int | None = None
    """Tasks of both kinds for an update to the newest version; None: no further limit."""
    paced: int | None = None
    """Serving tasks for an update to the newest version; None: no further limit."""

    def take(self, *, serves: bool, updates: bool) -> bool:
        """Take one task and return True, if there is room for it."""
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
    """A job's next record, and the operations that follow from it."""

    record: JobRecord
    ledger: Ledger
    chosen: tuple[int, ...] = ()
    """Tasks whose operations may begin now within the budget, once they have a place."""
    overdue: tuple[int, ...] = ()
    """Tasks that must leave now, regardless of budget and approval."""
    detail: str = ""
    """Why the job waits, if it does."""
    moving: frozenset[int] = field(default=frozenset())
    """Those of `chosen` that need another machine."""
    serving: frozenset[int] = field(default=frozenset())
    """Tasks that serve: those of `chosen` are taken down only within the budget."""
    room: Room = field(default_factory=lambda: Room())
    held: list[int] = field(default_factory=list)
    """Serving tasks whose operations wait because too much capacity near them is lost."""
    waits_for_surge: bool = False
    """Other jobs use all extra tasks that the entitlement allows at once."""
    capped: int = 0
    """Tasks that began to leave machines whose power is capped."""

    def may_go_unproved(self, index: int, repairs: Collection[int]) -> bool:
        """Return whether a task may move to a machine that has not proved the host profile yet.

        False for a task that only moves for a better spread or use of machines.
        """
        return index not in repairs and index not in rebalanced(self.record)

    def runs_next(self) -> dict[int, JobSpec]:
        """Return the specification that each of `chosen` runs after it was taken down."""
        known = {task.index: task for task in self.record.tasks}
        return {
            index: self.record.specs.get(runs_next(self.record, known[index]), self.record.spec)
            for index in self.chosen
        }

    def took(self, record: JobRecord) -> None:
        """Replace the record by one with changed tasks, and follow their operations."""
        self.record = self.ledger.follow(self.record, record)
