"""A job's probes, hooks and notices: like those of an agent, but with ports by name."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Hook, HttpPath, Name, ProbeKind, Seconds, StartPeriod, Step
from agent.api.life import LongSeconds
from agent.api.notices import CAPACITY_OF_MAX
from agent.api.probes import InARow, ProbeCommand, check_probe


class _Written(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the types that users write."""


class JobProbe(_Written, frozen=True, kw_only=True):
    """How to recognize a healthy task; like the agent's probe, but with the port by name."""

    kind: ProbeKind = ProbeKind.HTTP
    port: Name | None = None
    """One of the job's `ports`; for `http` and `tcp`."""
    path: HttpPath = "/"
    """The path to request, for `http`."""
    command: ProbeCommand = []
    """For `exec`: run inside the task, which is healthy if it ends with 0."""
    interval_s: Seconds = 2.0
    """Time between two probes; at least 0.1 s pass, 0.5 s for `exec`."""
    timeout_s: Seconds = 2.0
    """An answer that takes longer is a failure."""
    successes: InARow = 1
    """Answers in a row that make a task healthy."""
    failures: InARow = 3
    """Failures in a row that make it unhealthy."""
    start_period_s: StartPeriod = 30.0
    """Seconds after its start in which failures do not count."""

    def __post_init__(self) -> None:
        """Refuse a probe without a target."""
        check_probe(self.kind, self.port, self.command)


class JobNotice(_Written, frozen=True, kw_only=True):
    """Notifies tasks that their machine leaves or that lent capacity is short (docs/elastic.md).

    With this table, which may be empty, each task finds `/run/twine-notice/notice.json`, also named
    in `TWINE_NOTICE`.
    """

    port: Name | None = None
    """One of the job's `ports`: the agent also sends a notice to it by POST, until the
    task answers with 2xx."""
    path: HttpPath = "/"
    """Path of the POST."""
    timeout_s: Seconds = 5.0
    """A later answer is ignored."""
    capacity_of: Annotated[list[Name], Meta(max_length=CAPACITY_OF_MAX)] = []
    """The notices say whether these entitlements have the lent machines that they want."""


class JobLife(_Written, frozen=True, kw_only=True):
    """What happens around the main process of each task (docs/task-lifecycle.md)."""

    init: Annotated[list[Step], Meta(max_length=16)] = []
    """Steps that must succeed before each start, in this order."""
    pre_stop: Hook | None = None
    """Run inside a task before it gets SIGTERM."""
    notice: JobNotice | None = None
    """Notifies tasks ahead of time that they must leave."""
    max_run_s: LongSeconds | None = None
    """A task that runs for longer is ended; that is a failure."""
    startup: JobProbe | None = None
    """Until it succeeds no other probe runs; if it fails for good, the task restarts."""
    liveness: JobProbe | None = None
    """If it fails for good, the task restarts by its restart policy."""
