"""Elastic capacity: the loan settings of entitlements, the loans, and how promises were kept.

The *promise of a loan* is the time in which a lent machine is back once it is wanted. The
borrower's tasks get the same time as notice.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta


class Promise(StrEnum):
    """Time in which a lent machine is returned."""

    QUICK = "2m"
    USUAL = "5m"
    SLOW = "15m"

    @property
    def seconds(self) -> float:
        """Return the time in seconds."""
        return 60.0 * int(self.value.removesuffix("m"))


class Elastic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an entitlement lends and borrows (docs/elastic.md)."""

    lend: bool = True
    """Whether its machines without tasks are lent."""
    promise: Promise = Promise.USUAL
    """Time in which it gets back a lent machine that it needs, its own or one of the free pool."""
    lend_after_s: Annotated[float, Meta(ge=60, le=604_800)] = 600.0
    """A machine is lent once it had no task for this long, and the entitlement's history predicts
    no need before it could be back."""
    borrow: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """The most machines that it has on loan at any time; 0: it borrows nothing."""
    notice: Promise = Promise.QUICK
    """The least notice that its tasks need: it gets no loan that promises less."""
    loan_s: Annotated[float, Meta(ge=300, le=604_800)] = 14_400.0
    """A loan to it ends after this long, if it is not called back before."""
    share: Annotated[int, Meta(ge=1, le=1000)] = 100
    """If there is too little for all borrowers, machines are shared in this proportion."""


class ElasticMode(StrEnum):
    """The treatment of idle machines."""

    OFF = "off"
    RECOMMEND = "recommend"
    """The report shows what would be lent; nothing is, and existing loans end as agreed."""
    APPLY = "apply"


class ElasticSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How idle machines are lent (docs/elastic.md). Times in seconds."""

    mode: ElasticMode = ElasticMode.OFF
    """Loans need borrowers: without an entitlement with `elastic.borrow` nothing is lent."""
    every_s: Annotated[float, Meta(gt=0)] = 180.0
    """Seconds between two matchings of idle machines with borrowers."""
    look_s: Annotated[float, Meta(gt=0)] = 5.0
    """Seconds between two checks whether an owner waits for a machine that is lent."""
    promise: Promise = Promise.USUAL
    """Promise of machines of the free pool, unless an entitlement was promised a shorter time."""
    free_idle_s: Annotated[float, Meta(ge=0)] = 300.0
    """A free machine is lent once it was free for this long."""
    keep_free: Annotated[int, Meta(ge=0)] = 0
    """Free machines that are never lent, in addition to those that the history predicts."""
    most_calls: Annotated[int, Meta(ge=1)] = 500
    """Machines that one check may call back: the size of an MSB in the paper."""


class LoanView(msgspec.Struct, frozen=True, kw_only=True):
    """One machine on loan."""

    machine: str
    donor: str
    """Empty: the free pool."""
    left_by: str = ""
    """Of a machine of the free pool: the entitlement that gave it back last."""
    borrower: str
    since: float
    promise_s: float
    """Seconds in which it is back once it is wanted; 0: lent by hand, without a promise."""
    until: float | None = None
    revoked_at: float | None = None
    return_by: float | None = None
    tasks: int = 0
    why: str = ""
    """Why it was called back."""


class PromiseReport(msgspec.Struct, frozen=True, kw_only=True):
    """How loans of one promise ended, since the control plane counts them (EL7).

    Times are of the last `samples` revoked loans, in seconds.
    """

    promise_s: float
    ended: int = 0
    revoked: int = 0
    """Loans that were called back before their agreed end."""
    forced: int = 0
    """Loans whose machine still had tasks at the deadline."""
    interrupted: int = 0
    """Tasks that ran when their machine was called back."""
    broken: int = 0
    """Machines that came back later than promised. One that is late now raises an alarm; the count
    is never reset."""
    samples: int = 0
    mean_notice_s: float = 0.0
    """Seconds from the revocation to the deadline of the tasks."""
    return_p50_s: float = 0.0
    return_p99_s: float = 0.0
    """Seconds from the revocation until the machine was back."""
    return_max_s: float = 0.0
    machine_hours: float = 0.0
    """Machine-hours of the loans that ended."""


class PoolElasticity(msgspec.Struct, frozen=True, kw_only=True):
    """What one entitlement lends, borrows and needs now."""

    entitlement: str
    used: int
    """Machines of its own with tasks."""
    expected: int
    """Most machines that it uses before a loan could be back, predicted from its history."""
    lent: int = 0
    borrowed: int = 0
    wanted: int = 0
    """Machines that it would borrow, in addition to its present ones."""
    short: int = 0
    """Machines that its quota gives it and that it waits for."""
    short_for_s: float = 0.0
    """Seconds for which it has waited; 0: it does not wait."""
    availability: float | None = None
    """Of a borrower: the share of its wanted machine time in which it had a machine."""
    left: int = 0
    """Free machines, including lent ones, that it gave back last; others may use them."""
    freed_machine_hours: float = 0.0
    """Machine-hours below its own peak of the last 8 days, since the count began (AS6)."""


class JobFreed(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity that one autoscaled job left to others."""

    job: str
    entitlement: str
    machine_hours: float
    """Machine-hours of its tasks below its peak, in shares of machines, since the count began."""


class ElasticReport(msgspec.Struct, frozen=True, kw_only=True):
    """Elastic capacity at one moment, and how promises were kept (EL7)."""

    at: float
    mode: ElasticMode
    loans: list[LoanView] = []
    promises: list[PromiseReport] = []
    pools: list[PoolElasticity] = []
    freed: list[JobFreed] = []
    late: list[str] = []
    """Machines that are not back though the promised time is over: an alarm."""
    free: int = 0
    """Usable machines of the free pool …"""
    kept: int = 0
    """… and how many of them are not lent, because owners are expected to need them."""
    proposed: int = 0
    """Machines that the last matching lent, or would have."""
    holding: str = ""
    """Why nothing is lent now; empty: nothing prevents it, or there is nothing to lend."""


class ElasticCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Measured numbers that are cheap to read."""

    loans: int = 0
    leaving: int = 0
    late: int = 0
    short: int = 0
    """Entitlements."""
    wanting: int = 0
    """Entitlements."""
    kept: int = 0
    revoked: int = 0
    broken: int = 0
    interrupted: int = 0


class CapacityState(StrEnum):
    """Whether a borrower has the machines that it wants."""

    FULL = "full"
    SHORT = "short"
    ABSENT = "absent"


class CapacitySignal(msgspec.Struct, frozen=True, kw_only=True):
    """Lets a service degrade in time: how much opportunistic capacity there is (EL9)."""

    entitlement: str
    state: CapacityState
    machines: int
    """Machines on loan, and not called back."""
    wanted: int
    """Machines that it wants in addition to these."""
    leaving: int = 0
    """Machines that are called back and not returned yet."""
    next_deadline: float | None = None
    """When the first of them must be returned, in seconds since 1970."""


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of spare machines: held once for the region, or by every owner separately."""

    kind: str
    """`fault`, `maintenance`, `release` or `growth`."""
    central: int
    siloed: int
    """The sum over the owners of what each would need."""
    why: str
    """How the number was computed, with its inputs."""


class Buffers(msgspec.Struct, frozen=True, kw_only=True):
    """Spare machines of the region (EL10)."""

    buffers: list[Buffer] = []
    used: int = 0
    """Machines with tasks."""
    central: int = 0
    siloed: int = 0
    gain: float = 0.0
    """Increase of the share of machines in use by central buffers: 0.03 is 3 points."""


class UseHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Machines with tasks of one entitlement, the most in each 5 minutes; stored."""

    schema: int = 1
    pool: str
    last: int = 0
    """Number of the newest slot: seconds since 1970, divided by 300."""
    used: list[int] = []
    """Oldest first; at most 8 days of them."""
    freed_h: float = 0.0
    wanted_s: float = 0.0
    had_s: float = 0.0
    """Machine-seconds that it wanted from others, and machine-seconds that it had."""


class PromiseCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How loans of one promise ended; stored."""

    schema: int = 1
    promise_s: float
    ended: int = 0
    revoked: int = 0
    forced: int = 0
    interrupted: int = 0
    broken: int = 0
    machine_s: float = 0.0
    notices_s: list[float] = []
    returns_s: list[float] = []
    """Of the last 1,000 that were revoked."""


class FreedBy(msgspec.Struct, frozen=True, kw_only=True):
    """The highest size of one autoscaled job, and the capacity that it freed since; stored."""

    schema: int = 1
    job: str
    entitlement: str
    peak: float = 0.0
    """Machines, in shares that its tasks claim."""
    machine_h: float = 0.0
