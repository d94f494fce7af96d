"""An independent checker: after each event it verifies what must always hold.

It shares nothing with the control plane's decisions. It sees what runs on the machines, what
is written to the stores (decoded here, the few fields it needs), what clients were granted
and the endpoints they receive. Each rule checks only what an event changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from agent import api
from agent.api import Health, ProfileState
from control_plane.api.jobs import Endpoints
from control_plane.store.protocol import Operation, Put
from vm_lab.region.budget_checker import BudgetChecker
from vm_lab.region.machine import RESERVE_BYTES, Copy, SimulatedMachine, patience_of
from vm_lab.region.observer import Observer
from vm_lab.region.standing import (
    LAG_S,
    NEWS_S,
    POLL_S,
    TALK_S,
    CheckerStanding,
    StoredLoan,
    StoredMachine,
)
from vm_lab.region.surge_checker import SurgeChecker

if TYPE_CHECKING:
    from vm_lab.region.clients import ClientWish
    from vm_lab.region.seed import SimulatedRegion

MACHINES = "machines/"
DOUBLE_S = 120.0
"""Seconds that two copies may last once both machines can be reached."""
PAUSE_S = 2.5
"""A process that stood still for less may take it for a busy host."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that must never happen, and did."""

    rule: str
    at: float
    text: str

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.at:.1f}s {self.rule}: {self.text}"


def is_profile_of(name: str, base: str) -> bool:
    """Return whether a profile is the one named, or one that its owner made of it."""
    return name == base or name.startswith(f"{base}-")


@dataclass(slots=True)
class Checker(Observer):
    """Observes the region, and records violations."""

    region: SimulatedRegion
    violations: list[Violation] = field(default_factory=list)
    copies: dict[str, dict[str, Copy]] = field(default_factory=dict)
    """Task → machine → its copy there, of all that are alive."""
    standings: dict[str, CheckerStanding] = field(default_factory=dict)
    failed_at: dict[tuple[str, str], float] = field(default_factory=dict)
    """Task and machine → since when its copy there is not well."""
    undisturbed_since: float = 0.0
    """Since when the control plane has been running without a pause."""
    loans_revoked: int = 0
    """Machines that were called back, with a promise."""
    _before_pause: float = 0.0
    """Since when it had been running when it last stood still …"""
    _paused_at: float = 0.0
    """… and since when it does."""
    _sent_ready: dict[tuple[str, str], float] = field(default_factory=dict)
    """Task and machine → when its start was sent last while the machine had proved the profile."""
    _seen: set[str] = field(default_factory=set)
    _surges: SurgeChecker = field(default_factory=SurgeChecker)
    budgets: BudgetChecker = field(init=False)

    def __post_init__(self) -> None:
        """Start with all machines."""
        self.standings = {name: CheckerStanding() for name in self.region.machines}
        self.budgets = BudgetChecker(self)

    @property
    def now(self) -> float:
        """Return the present."""
        return self.region.timeline.now

    def violate(self, rule: str, text: str, once: str = "") -> None:
        """Write a violation down; the same one again is not."""
        key = f"{rule} {once or text}"
        if key not in self._seen:
            self._seen.add(key)
            self.violations.append(Violation(rule, self.now, text))
            self.region.history.note(f"VIOLATION {rule}: {text}")

    # -- machines

    def copy_changed(self, machine: SimulatedMachine, copy: Copy, *, was_alive: bool) -> None:
        """At most one copy of a `stop` task; a machine is not over what it has."""
        task = copy.task_id
        self.region.intent_checker.happened()
        if copy.alive and copy.health is Health.HEALTHY:
            self.failed_at.pop((task, machine.name), None)
        else:
            self.failed_at.setdefault((task, machine.name), self.now)
        if copy.alive == was_alive:
            return
        there = self.copies.setdefault(task, {})
        if not copy.alive:
            there.pop(machine.name, None)
            return
        there[machine.name] = copy
        self._surge(task.rpartition("-")[0])
        if len(there) > 1:
            self._doubled(task)
        self._capacity(machine)

    def _surge(self, job: str) -> None:
        owned = self.region.clients.jobs.get(job)
        if excess := self._surges.excess(job, owned, self.copies):
            self.violate("surge", excess, job)

    def _doubled(self, task: str) -> None:
        where = self.copies[task]
        if any(patience_of(copy.spec) is not None for copy in where.values()):
            self.violate("one-copy", f"{task} runs on {' and '.join(sorted(where))}", task)
        self.region.timeline.after(DOUBLE_S, self._still_double, task)

    def _still_double(self, task: str) -> None:
        """Check that two copies of a `keep` task end once both machines can be reached.

        One that is on its way out takes the time that its owner allows.
        """
        where = {name: c for name, c in self.copies.get(task, {}).items() if c.wanted}
        if len(where) < 2:
            return
        quiet = self.now - DOUBLE_S
        told = self.undisturbed_since <= quiet and self.region.stores_sound(DOUBLE_S)
        if told and all(
            self.standings[name].sound and self.standings[name].sound_since <= quiet
            for name in where
        ):
            self.violate(
                "one-copy-after-healing",
                f"{task} still runs on {' and '.join(sorted(where))}",
                task,
            )
        self.region.timeline.after(30.0, self._still_double, task)

    def _capacity(self, machine: SimulatedMachine) -> None:
        wanted = [copy.spec.limits for copy in machine.copies.values() if copy.wanted]
        memory = sum(limits.memory_max_bytes for limits in wanted)
        cores = sum(round((limits.cpu_max_cores or 0.0) * 1000) for limits in wanted)
        if memory > machine.memory_bytes - RESERVE_BYTES:
            self.violate("capacity", f"{machine.name} has promised {memory} bytes", machine.name)
        if cores > machine.cpus * 1000:
            self.violate("capacity", f"{machine.name} has promised {cores} mCPU", machine.name)

    def put_accepted(self, machine: SimulatedMachine, task_id: str, spec: api.TaskSpec) -> None:
        """A task starts on a machine whose profile is that of its entitlement, and verified."""
        profile, standing = machine.profile.status, self.standings[machine.name]
        known_s = NEWS_S if standing.sound and self.now - standing.sound_since >= LAG_S else LAG_S
        if (
            profile.state is ProfileState.DRIFTED
            and self.now - machine.profile.drifted_at < known_s
        ):
            return  # it was changed by hand while the task was on its way
        sent_at = self._sent_ready.get((task_id, machine.name), float("-inf"))
        if profile.state is ProfileState.APPLYING and self.now - sent_at < LAG_S:
            return  # a change of the profile came while the task was on its way
        if not self._has_profile(machine, spec.entitlement):
            self.violate(
                "profile", f"{task_id} starts on {machine.name}: {profile.name} {profile.state}"
            )

    def _has_profile(self, machine: SimulatedMachine, entitlement: str) -> bool:
        wanted, profile = self.region.clients.entitlements.get(entitlement), machine.profile.status
        is_right = wanted is None or is_profile_of(profile.name, wanted.host_profile)
        return is_right and profile.state is ProfileState.VERIFIED

    def has_one_owner(self, entitlement: str) -> None:
        """An entitlement is one shard's at any time, and of none only while it is moved."""
        owners = self.region.plane.owners(entitlement)
        if len(owners) > 1:
            self.violate("one-owner", f"shards {owners} own {entitlement}", entitlement)

    def put_sent(self, machine: SimulatedMachine, task_id: str, spec: api.TaskSpec) -> None:
        """A second copy is asked for only after the first is gone, or its machine down."""
        if self._has_profile(machine, spec.entitlement):
            self._sent_ready[task_id, machine.name] = self.now
        standing = self.standings[machine.name]
        if standing.entitlement != spec.entitlement:
            self.violate(
                "assignment",
                f"{task_id} of {spec.entitlement} is sent to {machine.name}"
                f" of {standing.entitlement or 'no entitlement'}",
            )
        self.has_one_owner(spec.entitlement)
        owned = self.region.clients.jobs.get(task_id.rpartition("-")[0])
        if owned is not None and spec.image not in owned.images:
            self.violate(
                "version", f"{task_id} is sent with an image that its job does not ask for"
            )
        for name, copy in self.copies.get(task_id, {}).items():
            other = self.standings[name]
            known = other.state == "up" and self.now - other.up_since > NEWS_S
            if name != machine.name and known and copy.wanted:
                self.violate(
                    "second-copy",
                    f"{task_id} is sent to {machine.name} while it runs on {name}, which is up",
                    f"{task_id} {name}",
                )

    def reach_changed(self, machine: SimulatedMachine) -> None:
        """Record since when a machine can or cannot be expected to answer in time."""
        path = self.region.network.paths.get(machine.name)
        answers = path is not None and self.region.network.answers(machine)
        sound = (
            path is not None
            and answers
            and not (machine.slow_s or machine.garbled or path.delay_s > 0.5 or path.loss)
        )
        standing = self.standings[machine.name]
        if answers:
            standing.gone_since = None
        elif standing.gone_since is None:
            standing.gone_since = self.now
        if sound != standing.sound:
            if standing.sound and self.now - standing.sound_since >= TALK_S:
                standing.heard_at = self.now
            standing.sound, standing.sound_since = sound, self.now

    # -- the control plane

    def stored(self, store: str, operations: Sequence[Operation]) -> None:
        """A machine belongs to one entitlement; it is not called down while it answers."""
        self.region.intent_checker.happened()
        self._surges.stored(operations)
        for operation in operations:
            if isinstance(operation, Put) and operation.key.startswith(MACHINES):
                self._machine_stored(
                    store, msgspec.json.decode(operation.value, type=StoredMachine)
                )

    def _machine_stored(self, store: str, record: StoredMachine) -> None:
        standing = self.standings[record.machine]
        if standing.store and standing.store != store:
            self.violate("assignment", f"{record.machine} is in {standing.store} and {store}")
        standing.store = store
        if record.entitlement != standing.entitlement:
            self._assigned_anew(record.machine, record.entitlement)
            standing.entitlement = record.entitlement
        self._lent(record.machine, standing, record.loan)
        if record.state == standing.state:
            return
        standing.state = record.state
        if record.state == "up":
            standing.up_since = self.now
        else:
            standing.down_since = self.now
            self._verdict(record.machine, standing)

    def _lent(self, name: str, standing: CheckerStanding, loan: StoredLoan | None) -> None:
        """A machine that was lent is back within what was promised, once it is called back."""
        before, standing.loan = standing.loan, loan
        if loan is None or not loan.promise_s or loan.revoked_at is None:
            return
        if before is None or before.revoked_at is None:
            self.loans_revoked += 1
            called_at = self.now
            self.region.timeline.after(loan.promise_s, self._is_back, name, loan.since, called_at)

    def _is_back(self, name: str, since: float, called_at: float) -> None:
        loan = self.standings[name].loan
        life = self.region.plane.life
        calm = life is not None and life.alive and self.undisturbed_since <= called_at
        sound = self.region.stores_sound(self.now - called_at + LAG_S)
        if loan is not None and loan.since == since and calm and sound:
            waited = self.now - called_at
            self.violate("promise", f"{name} is not back {waited:.0f} s after it was called", name)

    def _verdict(self, name: str, standing: CheckerStanding) -> None:
        """A machine is called down after it was silent for as long as that takes, not before."""
        after = self.region.plane.settings.down_after_s
        if standing.sound:
            silent, excused = 0.0, self.now - standing.sound_since < LAG_S
        else:
            silent, excused = self.now - standing.heard_at + POLL_S, False
        life = self.region.plane.life
        # a process that stands still concludes nothing: what is written now was under way
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

    def _assigned_anew(self, name: str, entitlement: str) -> None:
        """A machine changes hands when nothing runs on it, or when it is down."""
        standing = self.standings[name]
        machine = self.region.machines[name]
        alive = [c.task_id for c in machine.copies.values() if c.alive and c.wanted]
        if alive and standing.entitlement and standing.state == "up" and standing.sound:
            self.violate(
                "assignment",
                f"{name} goes from {standing.entitlement} to {entitlement or 'the free pool'} with"
                f" {', '.join(alive[:3])} on it",
                name,
            )

    def plane_changed(self, what: str) -> None:
        """Record since when the control plane runs undisturbed; check for losses later."""
        if what == "frozen":
            self._before_pause, self._paused_at = self.undisturbed_since, self.now
        is_short = what == "thawed" and self.now - self._paused_at < PAUSE_S
        self.undisturbed_since = self._before_pause if is_short else self.now
        if what == "serves":
            self.budgets.endpoints.clear()

    def plane_failed(self, reason: str) -> None:
        """The process goes on whatever happens to it."""
        self.violate("life", f"the control plane ended by itself: {reason[:300]}", reason[:60])

    def late(self, wish: ClientWish) -> None:
        """People get an answer while nothing is wrong with the main store."""
        life = self.region.plane.life
        awake = life is not None and life.alive and not life.frozen
        if (
            awake
            and self.undisturbed_since <= wish.asked_at
            and self.region.disks["main"].sound(self.now, self.now - wish.asked_at)
        ):
            waited = self.now - wish.asked_at
            self.violate("answer", f"no answer for {waited:.0f} s: {wish.text}", wish.text)

    def listed(self, endpoints: Endpoints) -> None:
        """What is taken from clients on purpose never brings a job below its budget."""
        self.budgets.listed(endpoints)
