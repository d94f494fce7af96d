"""How a job's tasks are brought to a newer version: the owner's policy, and the progress."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Count, Few, Seconds, Words

SURGE_MAX = 1000
DAY_S = 86_400


class OnFailure(StrEnum):
    """What happens to an update whose new tasks fail."""

    CONTINUE = "continue"
    """The update continues within the budget; the failed tasks count against the budget."""
    PAUSE = "pause"
    """No further task is updated until the owner resumes it."""
    ROLLBACK = "rollback"
    """The job goes back to what it ran before."""


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A few tasks that run the newest version for a while before any other does."""

    tasks: Annotated[int, Meta(ge=1, le=15_000)] = 1
    """Least number of canaries …"""
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """… and their share of all tasks, rounded up."""
    hold_s: Annotated[float, Meta(ge=0, le=7 * DAY_S)] = 600.0
    """Seconds for which all canaries must be healthy without a break."""


class UpdatePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many tasks may be unavailable at once, for any reason (SC6), and how updates proceed."""

    max_unavailable: Annotated[int, Meta(ge=0, le=10_000)] = 1
    """Voluntary operations stop while this many tasks are not healthy; failures count too. 0 only
    with `surge`."""
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 2.0
    """Time between removal from discovery and SIGTERM, so that clients disconnect."""
    batch: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """Number of tasks that are updated together. The next batch begins when all of them passed the
    gate; None: each task that passes is followed by the next one."""
    health_gate_s: Annotated[float, Meta(ge=0, le=DAY_S)] = 0.0
    """Seconds for which a new task must be healthy without a break before the next update."""
    healthy_within_s: Seconds = 300.0
    """Seconds after its start by which a new task must be healthy; later it has failed."""
    canary: Canary | None = None
    on_failure: OnFailure = OnFailure.CONTINUE
    failures: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Number of new tasks that must fail before `on_failure` takes effect."""
    surge: Annotated[int, Meta(ge=0, le=SURGE_MAX)] = 0
    """Tasks that may run in addition to the wanted ones while some are updated or must leave their
    machine: they are started first, as far as the entitlement has room (SC21)."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The progress of a job's newest version; stored with the job."""

    version: Count
    """The version that this is about."""
    base: Count = 0
    """The newest earlier version that all tasks ran; a rollback returns to it. 0: none."""
    passed: bool = False
    """The canaries succeeded, or there were none."""
    halted: bool = False
    """Too many new tasks failed; no further task is updated."""
    done: bool = False
    """All tasks run it and passed the gate."""
    failed: tuple[Few, ...] = ()
    """Indexes of new tasks that failed."""
    forgiven: Few = 0
    """Number of `failed` when the owner resumed the update."""
    returns_from: Count = 0
    """The failed or unwanted version that this one replaces; 0: none."""
    reason: Words = ""
    """Why it was halted, or why it is a rollback."""
