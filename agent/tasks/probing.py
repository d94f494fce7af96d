"""The probes of one running task: the startup probe, then the readiness and liveness probes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agent.api import Health, Probe, TaskState
from agent.runtime.core.records import TaskRecord, is_up
from agent.tasks.core.health import ProbeVerdict
from agent.tasks.prober import LOOPBACK, Prober

log = logging.getLogger(__name__)

Run = Callable[[str, list[str], float], Awaitable[str]]
"""Runs the command of a probe, given by its name, inside the task, with a timeout in s."""
RecordVerdict = Callable[[ProbeVerdict], Awaitable[None]]
"""Stores a probe's verdict."""


class Probing:
    """Runs the probes that one task needs now, and waits for each verdict to be recorded."""

    def __init__(
        self, prober: Prober, group: asyncio.TaskGroup, record_verdict: RecordVerdict
    ) -> None:
        """Await `record_verdict` with each verdict before the next probe."""
        self._prober, self._group, self._record_verdict = prober, group, record_verdict
        self._running: list[asyncio.Task[None]] = []
        self._current: object = None

    def stop(self) -> None:
        """Stop all probes of the task."""
        for task in self._running:
            task.cancel()
        self._running, self._current = [], None

    def follow(self, task: TaskRecord, now_s: float, run: Run) -> None:
        """Start the probes that a task needs now; unchanged probes continue."""
        wanted = _probes_to_run(task)
        key = (wanted, task.invocation_id)
        if key == self._current:
            return
        self.stop()
        self._current = key
        for name, probe in wanted:
            left_s = _start_period_left_s(probe, task, now_s)
            watch = self._watch(name, probe, task, left_s, run)
            self._running.append(self._group.create_task(watch))

    async def _watch(
        self, name: str, probe: Probe, task: TaskRecord, starting_s: float, run: Run
    ) -> None:
        async def report(health: Health, reason: str) -> None:
            await self._record_verdict(ProbeVerdict(task.invocation_id, name, health, reason))

        async def inside(command: list[str], timeout_s: float) -> str:
            problem = await run(name, command, timeout_s)
            return f"probe command {command[0]}: {problem}" if problem else ""

        known = task.health if name == "ready" else Health.UNKNOWN
        while True:
            try:
                await self._prober.watch(
                    probe, known, report, inside, starting_s=starting_s, at=_address(task)
                )
            except Exception:
                log.exception("a probe failed; this is a bug", extra={"task": task.task_id})
                await asyncio.sleep(probe.interval_s)


def _address(task: TaskRecord) -> str:
    """Return the address to probe: the last one is IPv4, on which any program can listen."""
    return task.addresses[-1] if task.addresses else LOOPBACK


def _probes_to_run(task: TaskRecord) -> list[tuple[str, Probe]]:
    if task.state is not TaskState.RUNNING:
        return []
    life = task.spec.life
    if not is_up(task):
        return [("startup", life.startup)] if life.startup else []
    named = (("ready", task.spec.probe), ("liveness", life.liveness))
    return [(name, probe) for name, probe in named if probe is not None]


def _start_period_left_s(probe: Probe, task: TaskRecord, now_s: float) -> float:
    """Return the remaining start period of a task; negative if it is over."""
    started_s = task.started_boot_s
    return probe.start_period_s - (0.0 if started_s is None else now_s - started_s)
