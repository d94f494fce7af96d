"""Records that cannot be read, or are not there, rebuilt from what runs and its copy in memory."""

from __future__ import annotations

import logging
from dataclasses import replace

from agent.runtime.core.records import TASK_UNITS, TaskRecord, task_of
from agent.runtime.events import HostEvents
from agent.runtime.journal import Journal, Replay
from agent.runtime.offload import Lanes
from agent.runtime.units import Units
from agent.tasks.core.reconcile import rebuilt
from agent.tasks.core.unit_properties import key_in
from wire.errors import HostError

log = logging.getLogger(__name__)


async def rebuild(
    replay: Replay, units: Units, journal: Journal, lanes: Lanes, events: HostEvents
) -> Replay:
    """Return what the journal holds with the records that could be rebuilt, now on disk, too.

    The unreadable ones are kept aside. A rebuilt record that cannot be written, on a
    read-only disk for one, is in force all the same.
    """
    if not replay.copies:
        return replay
    seen = {task_of(u.unit): key_in(u.description) for u in await units.all(TASK_UNITS)}
    found = rebuilt(replay.copies, seen, replay.unreadable)
    for task_id, record in found.items():
        why = replay.unreadable.get(task_id, "it is not there")
        log.error("a task record was rebuilt", extra={"task": task_id, "why": why})
        said = f"its record could not be read ({why}); it was rebuilt from its copy in memory"
        events.add("agent", task_id, said)
        await lanes.run("journal", _write, journal, record)
    left = {t: why for t, why in replay.unreadable.items() if t not in found}
    return replace(replay, tasks={**replay.tasks, **found}, unreadable=left, copies={})


def _write(journal: Journal, record: TaskRecord) -> None:
    journal.set_aside(record.task_id)
    try:
        journal.save(record)
    except HostError as e:
        extra = {"task": record.task_id, "why": str(e)}
        log.warning("a rebuilt record is in memory alone", extra=extra)
