"""What happens around a task's main process: before it, while it runs, before its end."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.notices import NoticeWish
from agent.api.probes import Probe
from agent.api.ranges import Argument, Name, Seconds, Written

Command = Annotated[list[Argument], Meta(min_length=1, max_length=4096)]
LongSeconds = Annotated[float, Meta(gt=0, le=31_536_000)]
"""Up to a year."""


class Step(Written, frozen=True, kw_only=True):
    """Something that has to end well before the main process starts."""

    name: Name
    """Shown in its unit's description and in errors."""
    command: Command
    """Run inside the task's own sandbox."""
    timeout_s: Seconds = 60.0
    """After this long it is ended, and the start has failed."""


class Hook(Written, frozen=True, kw_only=True):
    """A command that is run inside the task."""

    command: Command
    """Run inside the running task."""
    timeout_s: Seconds = 10.0
    """After this long it is ended; what it was run for happens all the same."""


class Life(Written, frozen=True, kw_only=True):
    """The parts of a task's life that most tasks do without."""

    init: Annotated[list[Step], Meta(max_length=16)] = []
    """Run in this order before each start, with the task's rights, limits and volumes, each in
    a unit of its own. One that fails is a failed start: the restart policy goes on from there."""
    pre_stop: Hook | None = None
    """Run inside the task before it gets SIGTERM; its time comes before `stop_timeout_s`."""
    max_run_s: LongSeconds | None = None
    """A main process that runs for longer is ended; that is a failure (`timeout`)."""
    notice: NoticeWish | None = None
    """Notices that its machine is going to be taken away, or that lent capacity is short."""
    startup: Probe | None = None
    """Until it succeeds no other probe is asked and the task is not healthy; one that fails for
    good restarts the task."""
    liveness: Probe | None = None
    """One that fails for good restarts the task, by its restart policy."""
    health_gate_s: Seconds | None = None
    """A new generation of a healthy task has to be healthy within this time and may not end
    before; else the host brings the old one back by itself. One without a probe has to run for
    all of this time."""
