"""Soft preferences: a machine property that parts machines into bins, and a strategy over bins.

To add a strategy, add a member to `api.policy.Strategy` and its score here. To add a
property, add it to `api.policy.Property` and to `feasibility.bin_of`; it belongs in
`SHARED` there if all machines of one type in one MSB have it in common: then whole buckets
are ordered by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from control_plane.allocator.core.feasibility import SHARED, Candidate, bin_of, names
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.api.policy import Preference, Property, Strategy

DEFAULT = (
    Preference(property=Property.MSB, strategy=Strategy.EVEN),
    Preference(property=Property.DATACENTER, strategy=Strategy.EVEN),
)
"""Over MSBs first, data centers between equals (docs/adr/0007-spread-by-msb.md)."""

_DEFAULT_PROPERTIES = tuple(p.property for p in DEFAULT)

Score = Callable[[int, int, int], int]
"""(tasks of the job in the bin, position of the bin among `values`, how many values) → score.

Lower is better. The position of a bin that is not named is the number of values.
"""

SCORES: Mapping[Strategy, Score] = {
    Strategy.EVEN: lambda tasks, _position, _values: tasks,
    Strategy.PACK: lambda tasks, _position, _values: -tasks,
    Strategy.PREFER: lambda _tasks, position, _values: position,
    Strategy.AVOID: lambda _tasks, position, values: int(position < values),
}
IMPROVING = frozenset({Strategy.PACK})
"""Strategies by which a bin gets better as tasks come to it; others never do."""

Scores = tuple[int, ...]
Scorer = Callable[[Sequence[str]], int]


class Ranking:
    """The preferences of one job while its tasks are placed: counts per bin, and scores."""

    def __init__(self, preferences: Sequence[Preference]) -> None:
        """Count no task yet."""
        self.shared = [p for p in preferences if p.property in SHARED]
        self.single = [p for p in preferences if p.property not in SHARED]
        self.properties = tuple(p.property for p in self.shared)
        self.packs_machines = any(
            p.property is Property.MACHINE and p.strategy is Strategy.PACK for p in self.single
        )
        self.looks_ahead = any(p.property is not Property.MACHINE or p.values for p in self.single)
        """Whether single machines differ by more than the job's tasks on them."""
        self.improves = any(p.strategy in IMPROVING for p in self.shared)
        self.limited = any(p.at_most is not None for p in self.single)
        self.capped = any(p.at_most is not None for p in self.shared)
        self._is_default = self.properties == _DEFAULT_PROPERTIES and all(
            p.strategy is Strategy.EVEN and p.at_most is None for p in self.shared
        )
        self._shared_counts: list[dict[str, int]] = [defaultdict(int) for _ in self.shared]
        self._single_counts: list[dict[str, int]] = [defaultdict(int) for _ in self.single]
        self.score_first = self._scorer(0)
        """How well bins of `properties` suit by the first preference; lower is better."""
        self.score_rest = self._rest_scorer()
        """How well they suit by the other ones."""

    @property
    def begins_evenly(self) -> bool:
        """Whether tasks spread over MSBs, then data centers, and none is counted yet."""
        return self._is_default and not any(self._shared_counts[0].values())

    def add(self, machine: Candidate, tasks: int = 1) -> None:
        """Count tasks of the job on a machine; a negative number takes them out again."""
        for preference, counts in zip(self.shared, self._shared_counts, strict=True):
            counts[bin_of(preference.property, machine)] += tasks
        for preference, counts in zip(self.single, self._single_counts, strict=True):
            counts[bin_of(preference.property, machine)] += tasks

    def add_bins(self, bins: Sequence[str], machine: Candidate) -> None:
        """Count one task on a machine whose bins of shared properties are known."""
        for number, counts in enumerate(self._shared_counts):
            counts[bins[number]] += 1
        if self.single:
            for preference, counts in zip(self.single, self._single_counts, strict=True):
                counts[bin_of(preference.property, machine)] += 1

    def _scorer(self, number: int) -> Scorer:
        if number >= len(self.shared):
            return lambda _bins: 0
        preference, counts = self.shared[number], self._shared_counts[number]
        if preference.strategy is Strategy.EVEN:
            return lambda bins: counts[bins[number]]  # the default; asked thrice per task
        return lambda bins: self._score(preference, counts, bins[number])

    def _rest_scorer(self) -> Callable[[Sequence[str]], Scores | int]:
        if len(self.shared) <= 2:
            return self._scorer(1)
        scorers = [self._scorer(number) for number in range(1, len(self.shared))]
        return lambda bins: tuple([scorer(bins) for scorer in scorers])

    def _score(self, preference: Preference, counts: Mapping[str, int], bin_: str) -> int:
        position, values = 0, preference.values
        if values:
            found = (i for i, value in enumerate(values) if names(bin_, value))
            position = next(found, len(values))
        return SCORES[preference.strategy](counts[bin_], position, len(values))

    def is_full(self, bins: Sequence[str]) -> Preference | None:
        """Return the preference by whose `at_most` no more tasks may go to these bins."""
        for p, counts, bin_ in zip(self.shared, self._shared_counts, bins, strict=True):
            if p.at_most is not None and counts[bin_] >= p.at_most:
                return p
        return None

    def score_single(self, machine: Candidate) -> Scores:
        """Return how well one machine suits among those with equal bins."""
        return tuple(
            self._score(p, counts, bin_of(p.property, machine))
            for p, counts in zip(self.single, self._single_counts, strict=True)
        )

    def is_single_full(self, machine: Candidate) -> Preference | None:
        """Return the preference by whose `at_most` this machine may get no more tasks."""
        for p, counts in zip(self.single, self._single_counts, strict=True):
            if p.at_most is not None and counts[bin_of(p.property, machine)] >= p.at_most:
                return p
        return None


def preferences_of(spec: JobSpec, entitlement: EntitlementSpec | None) -> tuple[Preference, ...]:
    """Return the soft preferences of a job: its own, its entitlement's, or the region's."""
    if spec.preferences is not None:
        return tuple(spec.preferences)
    if entitlement is not None and entitlement.preferences is not None:
        return tuple(entitlement.preferences)
    return DEFAULT
