"""The scheduler: brings the tasks of each job to the wanted state of its record, in rounds.

A round reads the reports of agents and decides the next operations (`core/decide.py`). It then
stores the record with its events, and only after that sends the commands. A round that changes
nothing is harmless, so every event that may matter wakes the job. Machines are allocated
concurrently with the rounds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from msgspec.structs import replace

from control_plane.agents.core.observed import View
from control_plane.agents.dispatcher import Dispatcher
from control_plane.agents.region import Region
from control_plane.api.jobs import JobRecord, JobStatus
from control_plane.api.limits import LimitName
from control_plane.api.machines import MachineRecord
from control_plane.api.operations import Cause
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.table import ignore
from control_plane.runtime.workers import Pace, Workers
from control_plane.scheduler.agent_commands import AgentCommands
from control_plane.scheduler.allocation_requests import OVERTAKEN_S, AllocationRequests
from control_plane.scheduler.approvals import Approvals
from control_plane.scheduler.core import release
from control_plane.scheduler.core.clock import Moment
from control_plane.scheduler.core.copies import second_copies
from control_plane.scheduler.core.decide import begin_operations, decide, settle
from control_plane.scheduler.core.decision import Decision, DecisionInput
from control_plane.scheduler.core.job_request import placed
from control_plane.scheduler.core.operations import waits
from control_plane.scheduler.core.reconcile import next_round_at
from control_plane.scheduler.core.rollout import summarize
from control_plane.scheduler.core.rollout_progress import describe_progress
from control_plane.scheduler.destinations import Destinations
from control_plane.scheduler.event_log import EventLog
from control_plane.scheduler.idle_jobs import IdleJobs
from control_plane.scheduler.losses import Losses
from control_plane.scheduler.placement import Placements
from control_plane.scheduler.round_inputs import RoundInputs, machines_of
from control_plane.scheduler.startup_barrier import ARRIVING_S, StartupBarrier
from control_plane.scheduler.surge_buffer import SurgeBuffer
from control_plane.scheduler.unknown_copies import UnknownCopies
from control_plane.task_control.controllers import Controllers
from wire.errors import Conflict

log = logging.getLogger(__name__)
_PAUSE_S, _PAUSE_MAX_S = 0.05, 1.0
"""Pause after each round of a job, so that a burst of reports causes few rounds."""
_PAUSE_TASK_S = 0.0005
"""Pause per task of the job: ten times the computing time of a round per task."""
_LIMITED_S = 2.0
"""Time to the next round of a job while a limit holds operations back."""
_GATHER_S = 0.05
"""Events that make room come in bursts; jobs that wait for room are woken once per burst."""
_LARGE = 100  # tasks; a round of a smaller job takes less than 1 ms, so it needs no checkpoint


class Scheduler:
    """Runs the rounds of all jobs of one shard."""

    def __init__(
        self,
        region: Region,
        jobs: JobTable,
        placements: Placements,
        dispatcher: Dispatcher,
        event_log: EventLog,
        controllers: Controllers,
        losses: Losses,
    ) -> None:
        self._jobs, self._log, self._losses = jobs, event_log, losses
        self._observations, self.runtime = region.observations, region.runtime
        self._settings = settings = region.settings
        self._placements, self._allocator = placements, placements.allocator
        self._group: asyncio.TaskGroup | None = None
        pace = Pace(retry_s=settings.retry_s)
        self._workers = Workers(region.runtime, "scheduler", self._work, pace, self._pause_s)
        self._is_waking = False
        self._details: dict[str, str] = {}
        self.requests = AllocationRequests(region, placements.allocator, self._workers)
        self.requests.answered = self.wake
        self._startup_barrier = StartupBarrier(region.observations, jobs)
        self._idle_jobs = IdleJobs(region.observations, region.runtime, settings.resync_s)
        self.approvals = Approvals(controllers, jobs, event_log)
        self._surge = SurgeBuffer(jobs, self.wake)
        self._round_inputs = RoundInputs(region, placements, self._idle_jobs, losses, self._surge)
        self._unknown = UnknownCopies(region, placements.allocator.directory)
        self._unknown.gone = lambda task: self.wake(task.rpartition("-")[0])
        self._commands = AgentCommands(region, jobs, placements, dispatcher, self._unknown)
        self.wanted = self._commands.wanted
        self._destinations = Destinations(region, placements, dispatcher, self._spawn)
        self.prepared_machines = self._destinations.prepared_machines
        self._capped = region.limits.of(
            LimitName.CAPPED_MOVES, settings.capped_moves_per_s, settings.capped_moves_burst
        )
        controllers.listen(self.wake)
        self._idle_jobs.follow(jobs, self.wake)
        region.broker.listen(self._machine_changed, loaded=ignore)
        region.observations.listen(self._machine_seen, self._task_or_image_seen)

    async def run(self, number: Callable[[], int]) -> None:
        """Schedule all jobs until cancelled; `number` returns the number of the term."""
        self._commands.number = number
        if self._observations.restored:
            self._unknown.begin()
        ends = self.runtime.on_pause(lambda _: self._round_inputs.restart_quiet_times())
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                for name in self._jobs:
                    self._wake_when_complete(name)
                await self._workers.run()
            finally:
                ends()
                self._group = None  # reports may still arrive during the shutdown

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine concurrently with the rounds; without rounds drop it."""
        if self._group is not None:
            self.runtime.spawn_in(self._group, "scheduler", work)
        else:
            work.close()

    async def status(self, name: str) -> JobStatus:
        """Return a job as its owner sees it."""
        record, detail = self._jobs.get(name), self.detail(name)
        status = await self.runtime.compute(len(record.tasks), summarize, record, detail)
        status = replace(status, update=self.update_note(status.record))
        copies = self.second_copies(status.record)
        more = f" (and {len(copies) - 1} more)" if len(copies) > 1 else ""
        details = (status.detail, "".join(copies[:1]) + more, self._unknown.waiting(status.record))
        return replace(status, detail="; ".join(filter(None, details)))

    def update_note(self, record: JobRecord) -> str:
        """Describe the progress of a job's update; empty: there is nothing to report."""
        return describe_progress(record, Moment(self.runtime.wall(), self.runtime.now()))

    def detail(self, name: str) -> str:
        """Return what the last round of a job waits for; empty: nothing."""
        return self._details.get(name, "")

    def second_copies(self, record: JobRecord) -> list[str]:
        """Describe which tasks of a job may run twice, and where."""
        if not record.leaving:
            return []
        pools, now = self._placements.pools_of(record), self.runtime.date()
        return second_copies(record, self._observations.view(pools, record.leaving, now))

    # -- waking

    def wake(self, name: str) -> None:
        """Start a round of a job soon, if the job belongs to this shard."""
        if self._placements.are_ours(self._jobs.find(name)):
            self._idle_jobs.note_wakeup(name)
            self._workers.wake(name)

    def _wake_when_complete(self, name: str) -> None:
        """Wake a job once all its machines have reported since the start, or after `ARRIVING_S`."""
        if self._startup_barrier.awaits(name) and self._placements.are_ours(self._jobs.find(name)):
            self._idle_jobs.note_wakeup(name)
            self._workers.wake_at(name, self.runtime.now() + ARRIVING_S)
        else:
            self.wake(name)

    def _machine_changed(self, name: str, *_: MachineRecord | None) -> None:
        jobs = self._allocator.directory.jobs(name) | self._destinations.take_awaiting(name)
        for job in sorted(jobs):
            self.wake(job)
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Wake the jobs whose tasks found no room, if there may be room soon."""
        if not self._is_waking and self._group is not None and self._allocator.waiting.is_due():
            self._is_waking = True
            asyncio.get_running_loop().call_later(_GATHER_S, self._wake_due)

    def _wake_due(self) -> None:
        self._is_waking = False
        for job in self._allocator.waiting.take_due():
            self.wake(job)

    def _machine_seen(self, name: str) -> None:
        if self._startup_barrier.is_first(name):
            for job in sorted(self._allocator.directory.jobs(name)):
                self._wake_when_complete(job)
            for job in sorted(self._destinations.take_awaiting(name)):
                self.wake(job)
            self._wake_waiting()
        else:
            self._machine_changed(name)
        self.stop_unknown_tasks(name)

    def _task_or_image_seen(self, machine: str, which: str) -> None:
        """Wake only the jobs that a report of one task or image affects."""
        known = self._allocator.directory.tasks(machine).get(which)
        if known is not None:
            self.wake(known.job)
        elif which in self._observations.observation(machine).images:
            for job in sorted(self._destinations.take_awaiting(machine)):
                self.wake(job)
        else:
            self._machine_seen(machine)
        self._wake_waiting()

    def stop_unknown_tasks(self, name: str) -> None:
        """Stop tasks that run on a machine although they were moved away or their job is gone."""
        if self._group is not None:
            self._commands.stop_unknown_tasks(name)

    # -- one job

    async def _work(self, name: str) -> float | None:
        """Do one round for a job; return the seconds until the next round at the latest."""
        skip_s = await self._skip_s(name)
        if skip_s is not None:
            return skip_s
        try:
            return await self._round(name)
        except Conflict as e:
            log.info(
                "decision dropped: the record changed meanwhile",
                extra={"job": name, "reason": str(e)},
            )
            return OVERTAKEN_S

    async def _skip_s(self, name: str) -> float | None:
        """Return for how many seconds rounds of an idle job may be skipped; None: it needs one."""
        record = self._jobs.find(name)
        if record is None or self.requests.is_pending(name):
            return None
        pool, entitlement = (
            self._placements.pool_of(record),
            self._placements.entitlement_of(record),
        )
        spread_state = self._round_inputs.spread_state(record)
        return await self._idle_jobs.skip_s(record, entitlement, spread_state, pool)

    def _pause_s(self, name: str) -> float:
        record = self._jobs.find(name)
        tasks = 0 if record is None else len(record.tasks)
        return min(_PAUSE_MAX_S, max(_PAUSE_S, tasks * _PAUSE_TASK_S))

    async def _round(self, name: str) -> float | None:
        """Decide, store the record, and send commands; return the seconds until the next round."""
        async with self._jobs.lock(name):
            before = self._jobs.find(name)
            if before is None or not self._placements.are_ours(before):
                self.forget(name)
                return None
            now = Moment(self.runtime.date(), self.runtime.now())
            entitlement = self._placements.entitlement_of(before)
            view = await self._round_inputs.view(before, now)
            inputs, decision = await self._decide(before, view, now)
            is_asked = name in self.requests.asking
            request = None if is_asked else self._placements.request(decision.record, view)
            answer = self.requests.take_answer(name, request)
            if not (decision.record.tasks or request or is_asked) and decision.record.stopping:
                await self._delete(decision)
                return 0.0
            if answer is not None and request is not None and request.groups:
                settle(decision, placed(decision.record, view, answer), now)
            await self._store(before, decision)
        if answer is None and request is not None:
            self.requests.ask(name, request, self._group)
        elif answer is not None and self._allocator.waiting.is_outdated(name, answer.gain):
            self.wake(name)
        self._wake_waiting()
        await self._yield_if_large(decision.record)
        if decision.record != before and not view.keys() >= machines_of(decision.record):
            view = await self._round_inputs.view(decision.record, now)
        has_asked = await self._send(decision.record, view)
        due_s = self._due_s(decision, inputs, view, now)
        await self._yield_if_large(decision.record)
        is_asking = (answer is None) != (request is None)
        if decision.record == before and not (has_asked or due_s or is_asking):
            state = self._round_inputs.spread_state(before)
            check_at = self._round_inputs.spread_check_at(before)
            self._idle_jobs.note_idle(before, entitlement, state, check_at)
        else:
            self._idle_jobs.forget(name)
        return min([self._settings.resync_s, *due_s])

    async def _decide(
        self, before: JobRecord, view: View, now: Moment
    ) -> tuple[DecisionInput, Decision]:
        """Decide the next state of a job, and begin the operations whose machines are ready.

        For a large job a thread computes the decision.
        """
        answer, moves = await self.approvals.join(before), self._capped.ready(now.steady)
        is_asking = before.name in self.requests.asking
        inputs, repairs = await self._round_inputs.inputs(
            before, view, now, answer, is_asking=is_asking, capped_moves=moves
        )
        decision = await self.runtime.compute(len(before.tasks), decide, before, inputs)
        entitlement = self._placements.entitlement_of(before)
        self._surge.reserve(before, decision, entitlement, inputs.surge_left)
        await self._yield_if_large(decision.record)
        if decision.chosen or decision.overdue:
            found = await self._destinations.find(decision, repairs)
            begin_operations(decision, found, inputs)
            if self._round_inputs.note_without_room(
                before.name, decision.chosen, found.without_room
            ):
                self.wake(before.name)  # the next round chooses other tasks, which may have room
            for _ in range(decision.capped):
                self._capped.take(now.steady)
        return inputs, decision

    async def _delete(self, decision: Decision) -> None:
        """Delete the record of a stopped job, whose last events stay in its log.

        A later job of this name continues its generations and call numbers. So neither agents nor
        the controller refuse its messages as outdated.
        """
        record, events = decision.record, decision.ledger.events
        await self._log.commit(self._jobs, record, events, is_gone=True)
        log.info("job deleted", extra={"job": record.name})

    async def _store(self, before: JobRecord, decision: Decision) -> None:
        """Store what a round changed, with its events."""
        decision.record = self.approvals.with_conversation(decision.record, before)
        await self._yield_if_large(decision.record)
        if decision.record != before:
            events = await self._log.commit(self._jobs, decision.record, decision.ledger.events)
            self.approvals.record_stored(decision.record, before, events)
        self._details[before.name] = decision.detail

    async def _send(self, record: JobRecord, view: View) -> bool:
        """Send the commands of a stored record, ask for approvals; return whether there are any
        commands.
        """
        has_sent = await self._commands.send(record, view)
        await self._yield_if_large(record)
        self.approvals.ask(record, view)
        return has_sent

    def _due_s(
        self, decision: Decision, inputs: DecisionInput, view: View, now: Moment
    ) -> list[float]:
        """Return after how many seconds a round is needed, even if nothing is reported."""
        times = (
            next_round_at(decision.record, now, view),
            release.next_round_at(decision.record, now),
        )
        due_s = [at - now.steady for at in times if at is not None]
        if decision.held:
            self._losses.note(next(iter(inputs.held_back.values())))
        if decision.held or self._waits_for_power(decision):
            due_s.append(_LIMITED_S)
        return due_s

    async def _yield_if_large(self, record: JobRecord) -> None:
        """Yield to the event loop between two parts of a round of a large job."""
        if len(record.tasks) >= _LARGE:
            await self.runtime.checkpoint()

    def _waits_for_power(self, decision: Decision) -> bool:
        """Return whether tasks still have to leave machines whose power is capped."""
        waiting = sum(
            1
            for task in decision.record.tasks
            if waits(task) and task.operation is not None and task.operation.cause is Cause.POWER
        )
        now = self.runtime.now()
        if waiting and not self._capped.ready(now):
            self._capped.hold_back(now, "tasks leave machines whose power is capped", 60.0)
        return waiting > 0

    def forget(self, name: str) -> None:
        """Drop the state of a job that was deleted or belongs to another shard."""
        self._workers.forget(name)
        self.approvals.forget(name)
        self._idle_jobs.drop(name)
        self._allocator.waiting.drop(name)
        self._placements.forget(name)
        self._round_inputs.forget(name)
        self.requests.forget(name)
        self._details.pop(name, None)
