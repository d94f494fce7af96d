"""Steps before a task's main process, probes while it runs, and a hook before its end."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from agent.api.notices import NoticeSettings
from agent.api.probes import Probe
from agent.api.ranges import Argument, Name, Seconds, Written

Command = Annotated[list[Argument], Meta(min_length=1, max_length=4096)]
LongSeconds = Annotated[float, Meta(gt=0, le=31_536_000)]
"""Up to a year."""


class Step(Written, frozen=True, kw_only=True):
    """A command that must succeed before the main process starts."""

    name: Name
    """Shown in its unit's description and in errors."""
    command: Command
    """Run inside the task's own sandbox."""
    timeout_s: Seconds = 60.0
    """A step that runs longer is ended, and the start fails."""


class Hook(Written, frozen=True, kw_only=True):
    """A command that is run inside the task."""

    command: Command
    """Run inside the running task."""
    timeout_s: Seconds = 10.0
    """A hook that runs longer is ended; the stop of the task then continues."""


class Life(Written, frozen=True, kw_only=True):
    """Optional parts of a task's life."""

    init: Annotated[list[Step], Meta(max_length=16)] = []
    """Run in this order before each start, with the task's rights, limits and volumes, each in
    its own unit. If a step fails, the start has failed, and the restart policy applies."""
    pre_stop: Hook | None = None
    """Run inside the task before it gets SIGTERM; its time comes before `stop_timeout_s`."""
    max_run_s: LongSeconds | None = None
    """A main process that runs longer is ended; this counts as a failure (`timeout`)."""
    notice: NoticeSettings | None = None
    """Notices that its machine will be taken away, or that lent capacity is short."""
    startup: Probe | None = None
    """Until this probe succeeds, no other probe runs and the task is not healthy. If it fails for
    good, the task is restarted."""
    liveness: Probe | None = None
    """If this probe fails for good, the task is restarted by its restart policy."""
    health_gate_s: Seconds | None = None
    """A new generation of a healthy task must become healthy within this time and must not end
    before. Otherwise the host restores the old generation. A task without a probe must run for
    all of this time."""
