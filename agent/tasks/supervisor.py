"""One loop per task: observe the host, decide (`tasks.core.lifecycle`), save, act, repeat."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from agent.api import RestartWhen, TaskState
from agent.lease.core.lease import is_bound, is_cut_off
from agent.runtime.core.records import (
    OVER,
    TaskRecord,
    describe_change,
    describe_status,
    durable_part,
    is_first_start,
    status_of,
    unit_of,
)
from agent.runtime.crashpoints import crash_point
from agent.runtime.stage import TaskStage
from agent.runtime.units import wait_woken
from agent.tasks.context import TaskContext
from agent.tasks.core.health import ProbeVerdict, after_verdict
from agent.tasks.core.inside import InsideCommand
from agent.tasks.core.lifecycle import Action, Decision, ObservedTask, ObservedUnit, decide
from agent.tasks.core.restarts import after_failure, evicted
from agent.tasks.core.unit_properties import not_after
from agent.tasks.probing import Probing
from wire.errors import Conflict, HostError, NotFound, StepFailed, TwineError

log = logging.getLogger(__name__)

_SHORT_LIVED = (TaskState.PREPARING, TaskState.STARTING)
"""Short-lived states. The status shows them, but no event is sent for them."""
STEADY_S = 600.0
"""Seconds between two full reads of a running task's unit; `Units.watch` reads its state sooner."""
RESYNC_S = 30.0
"""Seconds after which a loop observes the host again without a signal."""
RETRY_S = 1.0
"""Pause after a failure that cannot be reported."""
_FIELDS_OF_STAGES = ("own_cpus", "addresses")
"""Fields of a record that stages set."""
SLOT_S = 120.0
"""Longest time that a start keeps its slot, so that a hanging start does not delay others."""
CONFLICT_S = 0.2
"""Pause after a start whose unit name was taken: systemd has not unloaded the old unit yet."""


class TaskLoop:
    """Brings one task to its desired state and keeps it there.

    `record` is replaced under `_lock` only, so the record on disk is never older than the one that
    the loop acts on.
    """

    def __init__(
        self,
        host: TaskContext,
        record: TaskRecord,
        removed: Callable[[TaskRecord], Awaitable[None]],
        *,
        is_new: bool = False,
    ) -> None:
        """`record` is already saved; `removed` is awaited when nothing is left of the task.

        `is_new`: nothing of the task can be on the host yet, so the first step does not observe it.
        """
        self._host = host
        self.record = record
        self.settled = asyncio.Event()
        """Set after the first decision of the loop, or its first failure."""
        self._on_removed = removed
        self._unit = unit_of(record.task_id)
        self._waker = asyncio.Event()
        self._lock = asyncio.Lock()
        self._reported = status_of(record)
        self._is_removed = False
        self._durable_on_disk = durable_part(record)
        self._is_new = is_new
        self._next_seen: ObservedTask | None = None
        """Observation of the step just made, which the next step uses; None: it observes again."""
        self._hook_invocation = ""  # the run in which the pre-stop hook was last run
        self._group = asyncio.TaskGroup()
        self._probing = Probing(host.prober, self._group, self._record_verdict)

    async def change(self, make: Callable[[TaskRecord], TaskRecord]) -> TaskRecord:
        """Replace the record with the one that `make` returns; returns once it is on disk.

        The loop cannot act on the new record earlier, nor save an older one later: both need the
        same lock. Raises `NotFound` if the task was just removed, `HostError` if the record cannot
        be saved.
        """
        async with self._lock:
            if self._is_removed:
                raise NotFound(f"task {self.record.task_id} was just removed")
            before = self.record
            record = make(before)
            if record is before:
                return record
            renewed = before.cut_off and not record.cut_off
            self._host.contact.bind(record, renewed=renewed)
            self.record = record
            try:
                await self._save(record)
            except HostError:
                self.record = before
                self._host.contact.bind(before)
                raise
            self._is_new = False
            self._next_seen = None
            self._probing.stop()
        self._waker.set()
        self._report(record)
        return record

    async def run(self) -> None:
        """Run until the task is removed. When cancelled, the next agent can adopt the task."""
        with self._host.units.changes(self._unit, self._waker):
            async with self._group:
                try:
                    while await self._step_or_pause():
                        pass
                finally:
                    self._probing.stop()

    async def _step_or_pause(self) -> bool:
        """Take one step; an error leads to a pause and never ends the agent."""
        task_id = self.record.task_id
        try:
            return await self._step()
        except TwineError as e:
            log.warning("cannot manage a task", extra={"task": task_id, "why": str(e)})
        except Exception:
            log.exception("the loop of a task failed; this is a bug", extra={"task": task_id})
        self.settled.set()
        await asyncio.sleep(RETRY_S)
        return True

    async def _step(self) -> bool:
        if self._waker.is_set():
            self._next_seen = None  # the host has changed since this observation
        self._waker.clear()
        before = self.record
        seen = await self._observe()
        moment = self._host.contact.moment(before.task_id)
        observer = self._host.observer
        leaving, refusal = observer.is_leaving(), observer.start_refusal()
        decision = decide(before, seen, moment, leaving=leaving, start_refusal=refusal)
        if not await self._store(before, decision.task):
            return True
        crash_point(f"{decision.action}.decided")
        self.settled.set()
        self._probing.follow(self.record, self._host.contact.now_s(), self._probe)
        if seen.unit is None and decision.task.state in OVER:
            for stage in self._host.unit.stages:
                await stage.ended(before.task_id)
        if decision.action is Action.FORGET:
            return not await self._forget(decision.task)
        await self._act(decision, seen)
        return True

    async def _observe(self) -> ObservedTask:
        known, self._next_seen = self._next_seen, None
        if known is not None:
            return known
        if self._is_new:
            self._is_new = False
            return self._host.observer.unstarted()
        return await self._host.observer.observe(self.record)

    async def _store(self, before: TaskRecord, task: TaskRecord) -> bool:
        """Store a decision; False if the record has changed and the decision must be made again.

        Only facts that cannot be seen again on the host are written to disk.
        """
        async with self._lock:
            if self.record is not before:
                return False
            if task.spec is not before.spec:
                self._host.contact.bind(task)  # a failed health gate restored the old specification
            self.record = task
            if status_of(task) != status_of(before) and task.state not in _SHORT_LIVED:
                self._report(task)
            if durable_part(task) != self._durable_on_disk:
                await self._save(task, durable=not is_first_start(before, task))
        return True

    async def _save(self, task: TaskRecord, *, durable: bool = True) -> None:
        await self._host.storage.save(task, durable=durable)
        self._durable_on_disk = durable_part(task)

    async def _forget(self, task: TaskRecord) -> bool:
        """Remove the record of a task; False if its owner has requested the task again."""
        async with self._lock:
            if self.record is not task:
                return False
            await self._on_removed(task)
            crash_point("forget.done")
            self._is_removed = True
        return True

    def _report(self, task: TaskRecord) -> None:
        status = status_of(task)
        self._host.events.add("task", task.task_id, describe_status(status), status)
        extra = {"task": task.task_id, "state": str(task.state)}
        extra |= {"why": task.reason} if task.reason else {}
        log.info(describe_change(self._reported, status), extra=extra)
        self._reported = status
        for stage in self._host.unit.stages:
            stage.changed(task)

    async def _act(self, decision: Decision, seen: ObservedTask) -> None:
        task = decision.task
        try:
            await self._carry_out(decision, seen)
            crash_point(f"{decision.action}.done")
        except Conflict:  # a leftover command inside an earlier run may keep the unit loaded
            await self._host.inside.remove_leftovers(task.task_id)
            await wait_woken(self._waker, CONFLICT_S)
        except TwineError as e:
            extra = {"task": task.task_id, "step": str(decision.action), "why": str(e)}
            log.warning("a step of a task failed", extra=extra)
            if decision.action in (Action.PREPARE, Action.START):
                once = isinstance(e, StepFailed) and task.spec.restart.when is RestartWhen.NEVER
                retry = isinstance(e, HostError) and not once
                now = self._host.contact.moment(task.task_id)
                await self._store(task, after_failure(task, str(e), now, retry=retry))
            else:
                await asyncio.sleep(RETRY_S)

    async def _carry_out(self, decision: Decision, seen: ObservedTask) -> None:
        host, task = self._host, decision.task
        match decision.action:
            case Action.PREPARE:
                await host.storage.prepare_root(task)
                if self.record == task:
                    self._next_seen = dataclasses.replace(seen, root=True, leftover=True)
            case Action.START:
                for stage in host.unit.stages:
                    stage.check(task)
                guard: dict[str, object] = {}
                if is_bound(task.spec):
                    guard = not_after(host.contact.start_deadline_s(task.task_id))
                task = await self._run_stages(task, lambda stage, task: stage.ensure(task))
                if await self._run_init_steps(task, guard):
                    await self._start(task, guard)
            case Action.LIMIT:
                await self._apply_limits(task)
            case Action.STOP:
                if task.state is TaskState.STOPPING and seen.unit and not task.cut_off:
                    await self._run_pre_stop_hook(task, seen.unit)
                await host.units.stop(self._unit)
                await wait_woken(self._waker, 1.0)
            case Action.REMOVE_ROOT:
                if task.spec.life.init:
                    await host.inside.stop_init_steps(task.task_id)
                await host.inside.remove_leftovers(task.task_id)
                await host.inside.unmount_container(task)
                for stage in host.unit.stages:
                    await stage.release(task.task_id)
                # Last: while the root exists, the loop removes the task again after a crash.
                await host.storage.remove_root(task.task_id)
            case _:
                until = decision.until
                resync_s = STEADY_S if task.state is TaskState.RUNNING else RESYNC_S
                pause = resync_s if until is None else max(0.0, until - host.contact.now_s())
                await wait_woken(self._waker, pause)

    async def _start(self, task: TaskRecord, guard: dict[str, object]) -> None:
        """Start the unit once a slot is free, if the request has not changed meanwhile."""
        async with (host := self._host).starts.slot():
            if not self._is_to_start(task):
                return
            if task.invocation_id:
                await host.inside.remove_leftovers(task.task_id)
            await host.units.start(self._unit, host.unit(task) | guard)
            await self._wait_until_up(task)

    def _is_to_start(self, task: TaskRecord) -> bool:
        """Return whether the request is still the same, and the host may still run the task."""
        host, now = self._host, self.record
        if now.spec is not task.spec or now.wanted is not task.wanted or host.observer.is_leaving():
            return False
        cut_off = is_cut_off(task.spec, host.contact.moment(task.task_id))
        return not cut_off and not host.observer.start_refusal()

    async def _wait_until_up(self, task: TaskRecord) -> None:
        """Wait until the unit is active or has ended: until then a start uses most resources."""
        late_s = self._host.contact.now_s() + SLOT_S
        while self._is_to_start(task) and self._host.contact.now_s() < late_s:
            await wait_woken(self._waker, 2.0)
            self._waker.clear()
            unit = await self._host.units.find(self._unit)
            if unit is not None and unit.active == "active":
                self._next_seen = self._host.observer.of_active_unit(unit)
                return
            if unit is None or unit.active != "activating":
                break
        self._waker.set()

    async def evict(self, why: str) -> bool:
        """End the task because the host needs its memory; False if it does not run."""
        async with self._lock:
            before = self.record
            task = evicted(before, why, self._host.contact.moment(before.task_id))
            if task is before:
                return False
            await self._replace(task)
        return True

    async def _replace(self, task: TaskRecord, *, durable: bool = True) -> None:
        """Save a record that is in force even if the disk is full; raises `HostError` then."""
        try:
            await self._save(task, durable=durable)
        finally:
            self.record = task
            self._report(task)
            self._waker.set()

    async def _apply_limits(self, task: TaskRecord) -> None:
        """Apply the limits to the running unit, then record them."""
        await self._run_stages(task, lambda stage, task: stage.resize(task))
        spec = task.spec
        if self.record.spec == spec:
            kept = replace(self.record, limits=spec.limits, volumes=spec.volumes)
            await self._store(self.record, replace(kept, resources=spec.resources))

    async def _run_stages(
        self, task: TaskRecord, step: Callable[[TaskStage, TaskRecord], Awaitable[TaskRecord]]
    ) -> TaskRecord:
        """Call `step` for each stage in turn; record at once the values that a stage chose."""
        for stage in self._host.unit.stages:
            made = await step(stage, task)
            chosen = {
                f: getattr(made, f)
                for f in _FIELDS_OF_STAGES
                if getattr(made, f) != getattr(task, f)
            }
            if chosen:
                await self._store(self.record, replace(self.record, **chosen))
            task = made
        return task

    async def _run_init_steps(self, task: TaskRecord, guard: dict[str, object]) -> bool:
        """Run the init steps; False if the request changes or contact is lost before they end."""
        if not task.spec.life.init:
            return True
        host, wanted = self._host, self.record
        steps = asyncio.ensure_future(host.inside.run_init_steps(task, guard))
        try:
            while not steps.done() and self.record is wanted:
                if is_cut_off(task.spec, host.contact.moment(task.task_id)):
                    break
                waiting = asyncio.ensure_future(wait_woken(self._waker, RETRY_S))
                await asyncio.wait({steps, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                self._waker.clear()
            if steps.done() and self.record is wanted:
                await steps
                return True
        finally:
            steps.cancel()
        await host.inside.stop_init_steps(task.task_id)
        return False

    async def _run_pre_stop_hook(self, task: TaskRecord, unit: ObservedUnit) -> None:
        """Run the pre-stop hook once per run; the stop follows even if the hook fails."""
        if unit.active != "active" or unit.ended or unit.invocation_id == self._hook_invocation:
            return
        problem = await self._host.inside.before_stop(task)
        self._hook_invocation = unit.invocation_id
        if problem:
            log.warning("task %s: its pre-stop hook failed: %s", task.task_id, problem)
            message = f"its pre-stop hook failed: {problem}"
            self._host.events.add("task", task.task_id, message, status_of(task))

    async def _probe(self, name: str, command: list[str], timeout_s: float) -> str:
        """Run a command of a probe inside the task."""
        probe_command = InsideCommand(tuple(command), timeout_s, quiet=True)
        return await self._host.inside.run(self.record, name, probe_command)

    async def _record_verdict(self, verdict: ProbeVerdict) -> None:
        """Record a probe's verdict on disk, so that it survives a restart of the agent.

        This does not wait for systemd, so a hanging systemd hides no verdict.
        """
        async with self._lock:
            now = self._host.contact.moment(self.record.task_id)
            task = after_verdict(self.record, verdict, now)
            if task is self.record:
                return
            try:
                await self._replace(task, durable=verdict.probe != "ready")
            except HostError as e:
                log.warning("cannot store a verdict", extra={"task": task.task_id, "why": str(e)})
