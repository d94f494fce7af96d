"""Requests whose tasks found no room: decides when and in which order they try again (CP6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from control_plane.allocator.core.demand import Demand
from control_plane.allocator.core.request import Request

_MOST_AHEAD = 100
"""The most demands of higher priority that one plan respects, the highest priority first."""
_STALE = -1
"""Gain of an entry whose last answer is void."""


@dataclass(slots=True)
class WaitingDemand:
    """The demand of equal jobs of one pool that wait."""

    pool: str
    demand: Demand
    gain: int = 0
    """The pool's gains when one of these equal jobs last failed to find room."""
    jobs: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Entry:
    request: Request
    gain: int
    since: int
    """Arrival number: the longer a job has waited, the lower it is."""


class Waiting:
    """The jobs that wait for room, by pool and demand."""

    def __init__(
        self,
        priority: Callable[[str], int],
        gains: Callable[[str], int],
        losses: Callable[[], int] = lambda: 0,
    ) -> None:
        """`priority(pool)`, `gains(pool)` and `losses()` are called for every decision.

        Gains rise whenever there may be more room for that pool. Gains of other pools cause no new
        try and no precedence (BUG-AL2). Losses rise when a machine stops taking tasks: a job with a
        bounded skew may have waited for the bin of that machine.
        """
        self._priority, self._gains, self._losses = priority, gains, losses
        self._lost = 0
        """The losses that are already handled for jobs with a bounded skew."""
        self._bounded: dict[str, None] = {}
        """Waiting jobs with a bound on their skew."""
        self._entries: dict[str, _Entry] = {}
        self._arrived = 0
        """How many jobs ever began to wait."""
        self._demands: dict[tuple[str, Demand], WaitingDemand] = {}
        self._order: list[WaitingDemand] | None = None
        self._turns = 0
        """How often jobs had their turn: they were served, or tried without success."""
        self._began: dict[str, int] = {}
        """Job that is being tried → `_turns` when its try began."""
        self._refused: set[str] = set()
        """Jobs of `_began` that did not get a machine because of jobs with precedence."""
        self._behind: set[str] = set()
        """Jobs that wait until jobs with precedence had their turn."""
        self._again: set[str] = set()
        """Jobs that are tried again independent of the gains: jobs with precedence had their turn,
        or room changed during their try."""

        self.served: Callable[[], None] = self.let_others_try
        """Called when a job had its turn, so that jobs behind it may try, also in other queues."""
        self._returned_at: dict[str, int] = {}
        """Pool in which jobs wait → the gains for which its due jobs were last returned."""

    def begin(self, job: str) -> bool:
        """Record that a job is tried now; return whether its last answer is void.

        It is void if the job waited behind others and these had their turn.
        """
        self._began[job] = self._turns
        self._refused.discard(job)
        self._behind.discard(job)
        entry = self._entries.get(job)
        return entry is not None and entry.gain == _STALE

    def put(self, job: str, request: Request, gain: int) -> None:
        """Record that a request found no room when the gains of its pool were `gain`."""
        known = self._entries.get(job)
        self._again.discard(job)
        if known is None:
            self._arrived += 1
        self._entries[job] = _Entry(request, gain, known.since if known else self._arrived)
        self._returned_at.setdefault(request.pool, -1)
        if any(preference.max_skew is not None for preference in request.preferences):
            self._bounded[job] = None
        if known is None or known.request != request:
            if known is not None:
                self._forget_demand(job, known.request)
            for group in request.groups:
                key = (request.pool, group.demand)
                waiting_demand = self._demands.get(key)
                if waiting_demand is None:
                    waiting_demand = self._demands[key] = WaitingDemand(*key)
                    self._order = None
                waiting_demand.jobs.add(job)
        moved = False
        for group in request.groups:
            waiting_demand = self._demands[request.pool, group.demand]
            moved = moved or gain > waiting_demand.gain
            waiting_demand.gain = max(waiting_demand.gain, gain)
        if moved:
            self.served()
        if job in self._refused:
            self._behind.add(job)
            if self._began.get(job) != self._turns:
                self._let_try(job)
        if gain < self._gains(request.pool):  # room changed since, perhaps by this request
            self._again.add(job)

    def is_outdated(self, job: str, gain: int) -> bool:
        """Return whether a job that found no room at the gains `gain` is already due again."""
        entry = self._entries.get(job)
        return entry is not None and (
            entry.gain == _STALE or gain < self._gains(entry.request.pool)
        )

    def drop(self, job: str) -> None:
        """Record that a job no longer waits."""
        self._began.pop(job, None)
        self._refused.discard(job)
        self._behind.discard(job)
        self._again.discard(job)
        self._bounded.pop(job, None)
        known = self._entries.pop(job, None)
        if known is not None:
            self._forget_demand(job, known.request)
            self.served()

    def note_yielded(self, job: str) -> None:
        """Record that a job got no machine because other jobs have precedence."""
        self._refused.add(job)

    def reorder(self) -> None:
        """Record that priorities may have changed."""
        self._order = None

    def take_due(self) -> list[str]:
        """Return the jobs for which there may be room by now, by priority, then by waiting time.

        No job is returned twice for the same gains.
        """
        due, self._again = self._again, set()
        before, self._returned_at = self._returned_at, {}
        if self._lost != self._losses():
            self._lost = self._losses()
            for job in self._bounded:
                self._entries[job].gain = _STALE
                due.add(job)
        for job, entry in self._entries.items():
            pool = entry.request.pool
            now = self._returned_at.setdefault(pool, self._gains(pool))
            if before.get(pool, -1) < now > entry.gain:
                due.add(job)
        return sorted(due, key=self._rank)

    def _rank(self, job: str) -> tuple[int, int]:
        entry = self._entries[job]
        return -self._priority(entry.request.pool), entry.since

    def is_due(self) -> bool:
        """Return whether `take_due` may return a request."""
        gains = self._gains
        if self._bounded and self._lost != self._losses():
            return True
        if self._again:
            return True
        return any(gains(pool) != returned for pool, returned in self._returned_at.items())

    def requests(self) -> list[Request]:
        """Return all requests."""
        return [entry.request for entry in self._entries.values()]

    def ahead_of(self, priority: int) -> list[WaitingDemand]:
        """Return the demands of higher priority, highest first, for which there may be room."""
        if self._order is None:
            self._order = sorted(
                self._demands.values(),
                key=lambda demand: (-self._priority(demand.pool), demand.pool),
            )
        found = list[WaitingDemand]()
        for waiting_demand in self._order:
            if len(found) == _MOST_AHEAD or self._priority(waiting_demand.pool) <= priority:
                break
            if waiting_demand.gain < self._gains(waiting_demand.pool):
                found.append(waiting_demand)
        return found

    def _forget_demand(self, job: str, request: Request) -> None:
        for group in request.groups:
            key = (request.pool, group.demand)
            waiting_demand = self._demands.get(key)
            if waiting_demand is not None:
                waiting_demand.jobs.discard(job)
                if not waiting_demand.jobs:
                    del self._demands[key]
                    self._order = None

    def let_others_try(self) -> None:
        """Let jobs try again that waited behind a job that had its turn."""
        self._turns += 1
        for job in list(self._behind):
            self._let_try(job)

    def _let_try(self, job: str) -> None:
        self._behind.discard(job)
        self._entries[job].gain = _STALE
        self._again.add(job)
