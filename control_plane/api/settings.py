"""The knobs of the schedulers and their defaults; a section of the program's configuration."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast things are noticed and how much may happen at once. Times in seconds."""

    down_after_s: Positive = 10.0
    """A machine that did not answer for this long is down and its tasks move."""
    agent_grace_s: Positive = 600.0
    """A machine whose host refuses connections is alive and its tasks most likely run on; its
    agent has this long to come back before they are started elsewhere, a second time."""
    join_grace_s: Annotated[float, Meta(ge=0)] = 60.0
    """A machine that has just joined is not called down before: its agent is still starting."""
    poll_wait_s: Positive = 3.0
    """How long an agent may hold a request for events; below `down_after_s`, because the
    answer is also the sign of life."""
    poll_retry_s: Positive = 1.0
    """Pause after a poll that failed."""
    call_timeout_s: Positive = 10.0
    """For one call to an agent, the fetching of images excepted."""
    brake_share: Annotated[float, Meta(gt=0, le=1)] = 0.4
    """More machines than this share (and more than one) silent at once: perhaps it is this
    process that is cut off, so nothing moves …"""
    partition_grace_s: Positive = 300.0
    """… until they were silent for this long."""
    brake_window_s: Positive = 60.0
    """Losses this close to each other count as simultaneous."""
    reboot_grace_s: Positive = 300.0
    """A machine that reboots for its profile may be silent this long."""
    resync_s: Positive = 30.0
    """Every job is looked at this often even if nothing happened."""
    retry_s: Positive = 2.0
    """Pause after a command that an agent refused; doubles up to a minute."""
    give_back_after_s: Annotated[float, Meta(ge=0)] = 60.0
    """A machine that is empty and not needed goes back to the free pool after this long."""
    quarantine_s: Positive = 600.0
    """A machine that failed to reach a profile is not tried for it again before this."""
    destructive_per_s: Positive = 10.0
    """Stops and restarts that may be sent per second, over all machines …"""
    destructive_burst: Annotated[int, Meta(ge=1)] = 20
    """… after at most this many at once."""
    concurrent_calls: Annotated[int, Meta(ge=1)] = 64
    """Calls to agents that may be in flight together."""


class Approval(StrEnum):
    """Which requests for more capacity are granted without anybody looking at them."""

    FITS = "fits"
    """Those for which there are machines that nobody else was promised."""
    ALWAYS = "always"
    """None: every one waits in the queue. What gives capacity back does not."""


class Overgrant(StrEnum):
    """What becomes of a request that the region's machines cannot satisfy."""

    REFUSE = "refuse"
    ALLOW = "allow"
    """Whoever comes first gets machines: for regions in which not all quotas are used at once."""


class PortalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules of the capacity portal."""

    approval: Approval = Approval.FITS
    overgrant: Overgrant = Overgrant.REFUSE
    approvers: list[Annotated[str, Meta(min_length=1, max_length=63)]] = []
    """Users who decide requests, besides the operators at the socket."""
    keep_requests: Annotated[int, Meta(ge=10)] = 10_000
    """Decided requests that are kept, for the record."""
