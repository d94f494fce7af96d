"""How a job's tasks are brought to a newer version: what owners say, and how far it is."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Count, Few, Seconds, Words

SURGE_MAX = 1000
DAY_S = 86_400


class OnFailure(StrEnum):
    """What becomes of an update whose new tasks fail."""

    CONTINUE = "continue"
    """It goes on as far as the budget goes, against which the failed tasks count."""
    PAUSE = "pause"
    """No further task is updated until the owner says so."""
    ROLLBACK = "rollback"
    """The job goes back to what it ran before."""


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A few tasks that run the newest version for a while before any other does."""

    tasks: Annotated[int, Meta(ge=1, le=15_000)] = 1
    """How many, at least …"""
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    """… and which part of all tasks, rounded up."""
    hold_s: Annotated[float, Meta(ge=0, le=7 * DAY_S)] = 600.0
    """All of them must be healthy for so long without a break."""


class UpdatePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many tasks may be unavailable at once, for any reason (SC6), and how updates go on."""

    max_unavailable: Annotated[int, Meta(ge=0, le=10_000)] = 1
    """Voluntary operations stop while this many tasks are not healthy; failures count too. 0 only
    with `surge`."""
    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 2.0
    """From "not listed in discovery any more" to SIGTERM, so that clients disconnect."""
    batch: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """So many tasks are updated together, and the next ones only when all of these passed the
    gate; None: the next one as soon as one passed."""
    health_gate_s: Annotated[float, Meta(ge=0, le=DAY_S)] = 0.0
    """A new task must be healthy for so long without a break before another takes its turn."""
    healthy_within_s: Seconds = 300.0
    """A new task that is not healthy so long after its start has failed."""
    canary: Canary | None = None
    on_failure: OnFailure = OnFailure.CONTINUE
    failures: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """New tasks that have to fail for `on_failure`."""
    surge: Annotated[int, Meta(ge=0, le=SURGE_MAX)] = 0
    """Tasks that may run besides the wanted ones while some are updated or must leave their
    machine: they are started first, as far as the entitlement has room (SC21)."""


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a job is with its newest version; stored with it."""

    version: Count
    """Which one this is about."""
    base: Count = 0
    """The newest one before it that the job had on all its tasks, to go back to; 0: none."""
    passed: bool = False
    """The canaries held, or there were none."""
    halted: bool = False
    """Too many new tasks failed: no further one is updated."""
    done: bool = False
    """All tasks run it and passed the gate."""
    failed: tuple[Few, ...] = ()
    """Indexes of new tasks that failed."""
    forgiven: Few = 0
    """So many of `failed` the owner knew of when the update was resumed."""
    returns_from: Count = 0
    """The version that failed, or was not wanted, from which this one goes back; 0: none."""
    reason: Words = ""
    """Why it was halted, or is there to go back."""
