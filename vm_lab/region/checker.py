"""The checker of a simulated region: verifies after each event that no rule is broken.

It shares no code with the control plane's decisions. Its input is the tasks that run on machines,
the records written to the stores (it decodes the few fields it needs), the requests granted to
clients, and the endpoints that clients receive. Each rule checks only what an event changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from agent import api
from agent.api import Health, ProfileState
from control_plane.api.endpoints import Endpoints
from control_plane.store.protocol import Operation, Put
from vm_lab.region.budget_checker import BudgetChecker
from vm_lab.region.checked_machine import (
    CONTACT_S,
    DETECTION_S,
    POLL_S,
    REACTION_S,
    CheckedMachine,
    StoredLoan,
    StoredMachine,
)
from vm_lab.region.machine import RESERVE_BYTES, Copy, SimulatedMachine
from vm_lab.region.observer import Observer
from vm_lab.region.plane_contact import disconnect_limit_s
from vm_lab.region.surge_checker import SurgeChecker

if TYPE_CHECKING:
    from vm_lab.region.clients import ClientRequest
    from vm_lab.region.seed import SimulatedRegion

MACHINES = "machines/"
TWO_COPIES_S = 120.0
"""Seconds that two copies of a task may exist once both machines are reachable."""
PAUSE_S = 2.5
"""Seconds; a process cannot distinguish a shorter pause from a busy host."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that was broken."""

    rule: str
    at: float
    text: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.at:.1f}s {self.rule}: {self.text}"


def is_profile_of(name: str, base: str) -> bool:
    """Return whether a profile is `base`, or a profile that an owner derived from it."""
    return name == base or name.startswith(f"{base}-")


@dataclass(slots=True)
class Checker(Observer):
    """Observes the region, and records violations."""

    region: SimulatedRegion
    violations: list[Violation] = field(default_factory=list)
    copies: dict[str, dict[str, Copy]] = field(default_factory=dict)
    """Task → machine → its copy there; only copies that are alive."""
    machines: dict[str, CheckedMachine] = field(default_factory=dict)
    failed_at: dict[tuple[str, str], float] = field(default_factory=dict)
    """Task and machine → since when the copy there has not been healthy."""
    undisturbed_since: float = 0.0
    """Since when the control plane has been running without a pause."""
    loans_revoked: int = 0
    """Number of lent machines, with a promise, that were called back."""
    _before_pause: float = 0.0
    """`undisturbed_since` at the last pause."""
    _paused_at: float = 0.0
    """When the last pause began."""
    _verified_starts: dict[tuple[str, str], float] = field(default_factory=dict)
    """Task and machine → when a start was last sent while the machine's profile was verified."""
    _reported: set[str] = field(default_factory=set)
    _surges: SurgeChecker = field(default_factory=SurgeChecker)
    budgets: BudgetChecker = field(init=False)

    def __post_init__(self) -> None:
        """Start with all machines."""
        self.machines = {name: CheckedMachine() for name in self.region.machines}
        self.budgets = BudgetChecker(self)

    @property
    def now(self) -> float:
        """Return the virtual time, in seconds."""
        return self.region.timeline.now

    def violate(self, rule: str, text: str, about: str = "") -> None:
        """Record a violation, unless the rule already has one with the same `about` (or text)."""
        key = f"{rule} {about or text}"
        if key not in self._reported:
            self._reported.add(key)
            self.violations.append(Violation(rule, self.now, text))
            self.region.history.note(f"VIOLATION {rule}: {text}")

    # -- machines

    def copy_changed(self, machine: SimulatedMachine, copy: Copy, *, was_alive: bool) -> None:
        """Check the number of copies of a task, and the capacity of the machine."""
        task = copy.task_id
        self.region.intent_checker.schedule_checks()
        if copy.alive and copy.health is Health.HEALTHY:
            self.failed_at.pop((task, machine.name), None)
        else:
            self.failed_at.setdefault((task, machine.name), self.now)
        if copy.alive == was_alive:
            return
        copies = self.copies.setdefault(task, {})
        if not copy.alive:
            copies.pop(machine.name, None)
            return
        copies[machine.name] = copy
        self._check_surge(task.rpartition("-")[0])
        if len(copies) > 1:
            self._check_second_copy(task)
        self._check_capacity(machine)

    def _check_surge(self, job: str) -> None:
        owned = self.region.clients.jobs.get(job)
        if excess := self._surges.excess(job, owned, self.copies):
            self.violate("surge", excess, job)

    def _check_second_copy(self, task: str) -> None:
        copies = self.copies[task]
        if any(disconnect_limit_s(copy.spec) is not None for copy in copies.values()):
            self.violate("one-copy", f"{task} runs on {' and '.join(sorted(copies))}", task)
        self.region.timeline.after(TWO_COPIES_S, self._check_one_copy_left, task)

    def _check_one_copy_left(self, task: str) -> None:
        """Check that a `keep` task has one copy `TWO_COPIES_S` after both machines are reachable.

        A copy that is being stopped does not count: it may take the time that its owner allows.
        """
        copies = {name: c for name, c in self.copies.get(task, {}).items() if c.wanted}
        if len(copies) < 2:
            return
        begin = self.now - TWO_COPIES_S
        undisturbed = self.undisturbed_since <= begin and self.region.stores_faultless(TWO_COPIES_S)
        if undisturbed and all(
            self.machines[name].responsive and self.machines[name].responsive_since <= begin
            for name in copies
        ):
            self.violate(
                "one-copy-after-healing",
                f"{task} still runs on {' and '.join(sorted(copies))}",
                task,
            )
        self.region.timeline.after(30.0, self._check_one_copy_left, task)

    def _check_capacity(self, machine: SimulatedMachine) -> None:
        wanted = [copy.spec.limits for copy in machine.copies.values() if copy.wanted]
        memory = sum(limits.memory_max_bytes for limits in wanted)
        cores = sum(round((limits.cpu_max_cores or 0.0) * 1000) for limits in wanted)
        if memory > machine.memory_bytes - RESERVE_BYTES:
            self.violate("capacity", f"{machine.name} has promised {memory} bytes", machine.name)
        if cores > machine.cpus * 1000:
            self.violate("capacity", f"{machine.name} has promised {cores} mCPU", machine.name)

    def put_accepted(self, machine: SimulatedMachine, task_id: str, spec: api.TaskSpec) -> None:
        """Check that the machine runs the profile of the task's entitlement, verified."""
        profile, checked = machine.profile.status, self.machines[machine.name]
        known_s = (
            REACTION_S
            if checked.responsive and self.now - checked.responsive_since >= DETECTION_S
            else DETECTION_S
        )
        if (
            profile.state is ProfileState.DRIFTED
            and self.now - machine.profile.drifted_at < known_s
        ):
            return  # settings were changed by hand after the request was sent
        sent_at = self._verified_starts.get((task_id, machine.name), float("-inf"))
        if profile.state is ProfileState.APPLYING and self.now - sent_at < DETECTION_S:
            return  # the profile was changed after the request was sent
        if not self._has_profile(machine, spec.entitlement):
            self.violate(
                "profile", f"{task_id} starts on {machine.name}: {profile.name} {profile.state}"
            )

    def _has_profile(self, machine: SimulatedMachine, entitlement: str) -> bool:
        wanted, profile = self.region.clients.entitlements.get(entitlement), machine.profile.status
        is_right = wanted is None or is_profile_of(profile.name, wanted.host_profile)
        return is_right and profile.state is ProfileState.VERIFIED

    def check_one_owner(self, entitlement: str) -> None:
        """Check that at most one shard owns an entitlement; none owns it while it is moved."""
        owners = self.region.plane.owners(entitlement)
        if len(owners) > 1:
            self.violate("one-owner", f"shards {owners} own {entitlement}", entitlement)

    def put_sent(self, machine: SimulatedMachine, task_id: str, spec: api.TaskSpec) -> None:
        """Check the machine, owner and image of a request, and that no other copy is wanted."""
        if self._has_profile(machine, spec.entitlement):
            self._verified_starts[task_id, machine.name] = self.now
        checked = self.machines[machine.name]
        if checked.entitlement != spec.entitlement:
            self.violate(
                "assignment",
                f"{task_id} of {spec.entitlement} is sent to {machine.name}"
                f" of {checked.entitlement or 'no entitlement'}",
            )
        self.check_one_owner(spec.entitlement)
        owned = self.region.clients.jobs.get(task_id.rpartition("-")[0])
        if owned is not None and spec.image not in owned.images:
            self.violate(
                "version", f"{task_id} is sent with an image that its job does not ask for"
            )
        for name, copy in self.copies.get(task_id, {}).items():
            other = self.machines[name]
            known = other.state == "up" and self.now - other.up_since > REACTION_S
            if name != machine.name and known and copy.wanted:
                self.violate(
                    "second-copy",
                    f"{task_id} is sent to {machine.name} while it runs on {name}, which is up",
                    f"{task_id} {name}",
                )

    def reach_changed(self, machine: SimulatedMachine) -> None:
        """Record since when a machine can, or cannot, answer in time."""
        path = self.region.network.paths.get(machine.name)
        answers = path is not None and self.region.network.answers(machine)
        sound = (
            path is not None
            and answers
            and not (machine.slow_s or machine.garbled or path.delay_s > 0.5 or path.loss)
        )
        checked = self.machines[machine.name]
        if answers:
            checked.unreachable_since = None
        elif checked.unreachable_since is None:
            checked.unreachable_since = self.now
        if sound != checked.responsive:
            if checked.responsive and self.now - checked.responsive_since >= CONTACT_S:
                checked.last_contact = self.now
            checked.responsive, checked.responsive_since = sound, self.now

    # -- the control plane

    def stored(self, store: str, operations: Sequence[Operation]) -> None:
        """Check the machines and the tasks of a committed transaction."""
        self.region.intent_checker.schedule_checks()
        self._surges.stored(operations)
        for operation in operations:
            if isinstance(operation, Put) and operation.key.startswith(MACHINES):
                self._machine_stored(
                    store, msgspec.json.decode(operation.value, type=StoredMachine)
                )

    def _machine_stored(self, store: str, record: StoredMachine) -> None:
        checked = self.machines[record.machine]
        if checked.store and checked.store != store:
            self.violate("assignment", f"{record.machine} is in {checked.store} and {store}")
        checked.store = store
        if record.entitlement != checked.entitlement:
            self._check_reassignment(record.machine, record.entitlement)
            checked.entitlement = record.entitlement
        self._check_loan(record.machine, checked, record.loan)
        if record.state == checked.state:
            return
        checked.state = record.state
        if record.state == "up":
            checked.up_since = self.now
        else:
            self._check_verdict(record.machine, checked)

    def _check_loan(self, name: str, checked: CheckedMachine, loan: StoredLoan | None) -> None:
        """Check later that a lent machine that is called back returns within the promised time."""
        before, checked.loan = checked.loan, loan
        if loan is None or not loan.promise_s or loan.revoked_at is None:
            return
        if before is None or before.revoked_at is None:
            self.loans_revoked += 1
            called_at = self.now
            self.region.timeline.after(
                loan.promise_s, self._check_returned, name, loan.since, called_at
            )

    def _check_returned(self, name: str, since: float, called_at: float) -> None:
        loan = self.machines[name].loan
        life = self.region.plane.life
        is_undisturbed = life is not None and life.alive and self.undisturbed_since <= called_at
        sound = self.region.stores_faultless(self.now - called_at + DETECTION_S)
        if loan is not None and loan.since == since and is_undisturbed and sound:
            waited = self.now - called_at
            self.violate("promise", f"{name} is not back {waited:.0f} s after it was called", name)

    def _check_verdict(self, name: str, checked: CheckedMachine) -> None:
        """Check that a machine is recorded as down only after `down_after_s` without contact."""
        after = self.region.plane.settings.down_after_s
        if checked.responsive:
            silent, excused = 0.0, self.now - checked.responsive_since < DETECTION_S
        else:
            silent, excused = self.now - checked.last_contact + POLL_S, False
        life = self.region.plane.life
        # a stopped process decides nothing: this write was decided before the pause
        frozen = life is not None and life.frozen
        awake_since, writer = self.undisturbed_since, self.region.plane.writer
        if writer is not None:
            awake_since = writer.awake_since
        elif frozen:
            awake_since = self._before_pause
        awake = self.now - awake_since + POLL_S
        if not excused and min(silent, awake) < after:
            self.violate(
                "verdict",
                f"{name} is called down after {max(0.0, min(silent, awake) - POLL_S):.1f} s in"
                " which it could not answer",
                name,
            )

    def _check_reassignment(self, name: str, entitlement: str) -> None:
        """Check that a machine changes its entitlement only if it is down or runs no task."""
        checked = self.machines[name]
        machine = self.region.machines[name]
        alive = [c.task_id for c in machine.copies.values() if c.alive and c.wanted]
        if alive and checked.entitlement and checked.state == "up" and checked.responsive:
            self.violate(
                "assignment",
                f"{name} goes from {checked.entitlement} to {entitlement or 'the free pool'} with"
                f" {', '.join(alive[:3])} on it",
                name,
            )

    def plane_changed(self, what: str) -> None:
        """Record since when the control plane has run without a disturbance."""
        if what == "frozen":
            self._before_pause, self._paused_at = self.undisturbed_since, self.now
        is_short = what == "thawed" and self.now - self._paused_at < PAUSE_S
        self.undisturbed_since = self._before_pause if is_short else self.now
        if what == "serves":
            self.budgets.endpoints.clear()

    def plane_failed(self, reason: str) -> None:
        """Report that the control plane's process ended although no fault ended it."""
        self.violate("life", f"the control plane ended by itself: {reason[:300]}", reason[:60])

    def check_late_answer(self, request: ClientRequest) -> None:
        """Report a request without an answer that no fault of process or main store explains."""
        life = self.region.plane.life
        awake = life is not None and life.alive and not life.frozen
        if (
            awake
            and self.undisturbed_since <= request.sent_at
            and self.region.disks["main"].is_faultless(self.now, self.now - request.sent_at)
        ):
            waited = self.now - request.sent_at
            self.violate("answer", f"no answer for {waited:.0f} s: {request.text}", request.text)

    def endpoints_changed(self, endpoints: Endpoints) -> None:
        """Check which tasks a job no longer lists."""
        self.budgets.endpoints_changed(endpoints)
