"""The values of a decision about a job: its input, the machines that are ready, and its result."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from control_plane.agents.core.observed import View
from control_plane.allocator.core.claims import Claim
from control_plane.allocator.core.weighted_spread import OVER_MSBS, EvenSpread
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.operations import OperationLedger
from control_plane.scheduler.core.rebalance_moves import rebalanced
from control_plane.scheduler.core.task_versions import version_after_stop
from control_plane.task_control.core.conversation import ControllerAnswer


@dataclass(frozen=True, slots=True)
class DecisionInput:
    """The input of a decision, in addition to the record."""

    view: View
    now: Moment
    claims: Iterable[Claim] = ()
    """The job's claims, with the machines of its tasks."""
    even_spread: EvenSpread | None = OVER_MSBS
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
    """Tasks for which no machine had room when they were last chosen: others come first
    (BUG-CP63)."""


@dataclass(frozen=True, slots=True)
class FoundPlaces:
    """Which of the chosen tasks can start on a machine now."""

    ready: frozenset[int] = frozenset()
    """Tasks that have a machine with their image."""
    without_room: frozenset[int] = frozenset()
    """Tasks for which no machine has room."""
    detail: str = ""
    """Why other tasks are not ready."""


@dataclass(slots=True)
class DisruptionBudget:
    """How many tasks may still be taken down within the availability budget."""

    serving: int = 0
    """Tasks that serve."""
    broken: int = 0
    """Tasks that do not serve."""
    updates: int | None = None
    """Tasks, serving or not, for an update to the newest version; None: no further limit."""
    paced: int | None = None
    """Serving tasks for an update to the newest version; None: no further limit."""

    def take(self, *, serves: bool, updates: bool) -> bool:
        """Count one task as taken down and return True, if the budget allows it."""
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
    ledger: OperationLedger
    chosen: tuple[int, ...] = ()
    """Tasks whose operations may begin now within the budget, once a machine is ready."""
    overdue: tuple[int, ...] = ()
    """Tasks that must leave now, regardless of budget and approval."""
    detail: str = ""
    """Why the job waits, if it does."""
    moving: frozenset[int] = field(default=frozenset())
    """Which of `chosen` need another machine."""
    serving: frozenset[int] = field(default=frozenset())
    """Tasks that serve: those of `chosen` are taken down only within the budget."""
    budget: DisruptionBudget = field(default_factory=lambda: DisruptionBudget())
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

    def specs_after_stop(self) -> dict[int, JobSpec]:
        """Return the specification that each of `chosen` runs after its stop."""
        known = {task.index: task for task in self.record.tasks}
        return {
            index: self.record.specs.get(
                version_after_stop(self.record, known[index]), self.record.spec
            )
            for index in self.chosen
        }

    def replace_record(self, record: JobRecord) -> None:
        """Replace the record by one with changed tasks, and update their operations."""
        self.record = self.ledger.follow(self.record, record)
