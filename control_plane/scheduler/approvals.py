"""Connects the rounds of a job with the calls to its TaskController."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from control_plane.agents.core.observed import View
from control_plane.api.jobs import JobRecord
from control_plane.api.operations import JobEvent
from control_plane.runtime.job_table import JobTable
from control_plane.scheduler.core.approval import is_controlled, is_known, question
from control_plane.scheduler.event_log import PAGE_MAX, EventLog
from control_plane.task_control.controllers import NUMBERS_BLOCK, Controllers
from control_plane.task_control.core.conversation import ControllerAnswer

_NO_ANSWER = ControllerAnswer()
_UNKNOWN_S = 30.0
"""Time after a start in which tasks on machines that have not answered are not reported as down."""


class Approvals:
    """Sends questions to controllers, and stores in job records what a restart needs."""

    def __init__(self, controllers: Controllers, jobs: JobTable, log: EventLog) -> None:
        self._controllers, self._jobs, self._log = controllers, jobs, log
        self.note = controllers.describe

    async def join(self, record: JobRecord) -> ControllerAnswer:
        """Return the last answer of a job's controller; begins a conversation if needed."""
        ref = record.spec.controller
        if ref is None or not is_controlled(record):
            self.forget(record.name)
            return _NO_ANSWER
        if not self._controllers.has_begun(record.name):
            missed = list[JobEvent]()
            if record.asked:  # before the first call there was no controller to inform
                page = await self._log.page(self._jobs, record.name, record.reported, PAGE_MAX)
                missed = page.events
            self._controllers.begin(record.name, ref, record.reported, missed)
        return self._controllers.answer(record.name)

    def with_conversation(self, record: JobRecord, before: JobRecord) -> JobRecord:
        """Return the record with the part of the conversation that it stores."""
        name = record.name
        if not self._controllers.has_begun(name):
            return record
        if self._controllers.needs_numbers(name):
            # a new job of a used name continues above the numbers of the earlier job
            asked = max(record.asked, record.numbered, int(record.created_at)) + NUMBERS_BLOCK
            record = replace(record, asked=asked)
        reported = self._controllers.last_reported(name)
        if record == before or reported == record.reported:
            return record
        return replace(record, reported=reported)

    def record_stored(
        self, record: JobRecord, before: JobRecord, events: Sequence[JobEvent]
    ) -> None:
        """Called after a record has been written."""
        if not self._controllers.has_begun(record.name):
            return
        if record.asked != before.asked:
            self._controllers.reserve_numbers(
                record.name, record.asked - NUMBERS_BLOCK + 1, record.asked + 1
            )
        self._controllers.add_ended(record.name, events)

    def ask(self, record: JobRecord, view: View) -> None:
        """Ask the controller of a job, once enough machines of its tasks answered."""
        ref, name = record.spec.controller, record.name
        if ref is None or not self._controllers.has_begun(name):
            return
        if is_known(record, view) or self._controllers.age_s(name) >= _UNKNOWN_S:
            self._controllers.set_question(name, ref, question(record, view))

    def forget(self, name: str) -> None:
        """End the conversation about a job."""
        if self._controllers.has_begun(name):
            self._controllers.forget(name)
