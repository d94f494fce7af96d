"""Soft preferences: a machine property that divides machines into bins, and a strategy over bins.

To add a strategy, add a member to `api.policy.Strategy` and its score here. To add a property, add
it to `api.requirements` and to `matching.bin_of`. If `machine_class` has it, add it to
`feasibility.OF_BUCKETS`, too: then whole buckets are ordered by it. Labels, capabilities, memory
and disk are properties of single machines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from control_plane.allocator.core.feasibility import OF_BUCKETS, Candidate, bin_of, names
from control_plane.allocator.core.max_skew import EmptiestBin
from control_plane.allocator.core.weighted_spread import EvenSpread
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import JobSpec
from control_plane.api.policy import Preference, Property, Strategy
from control_plane.api.requirements import NUMBERS

DEFAULT = (
    Preference(property=Property.MSB, strategy=Strategy.EVEN),
    Preference(property=Property.DATACENTER, strategy=Strategy.EVEN),
)
"""Even over MSBs, and among equal MSBs even over data centers (docs/adr/0007-spread-by-msb.md)."""

Score = Callable[[int, int, int], int]
"""(tasks of the job in the bin, position of the bin among `values`, number of values) → score.

Lower is better. A bin that is not named has the number of values as its position.
"""

SCORES: Mapping[Strategy, Score] = {
    Strategy.EVEN: lambda tasks, _position, _values: tasks,
    Strategy.PACK: lambda tasks, _position, _values: -tasks,
    Strategy.PREFER: lambda _tasks, position, _values: position,
    Strategy.AVOID: lambda _tasks, position, values: int(position < values),
}
IMPROVING = frozenset({Strategy.PACK})
"""Strategies with which tasks can improve the score of a bin."""

STATIC = frozenset({Strategy.PREFER, Strategy.AVOID})
"""Strategies with which the score of a bin does not depend on its tasks."""

Scores = tuple[int, ...]
Bins = tuple[str, ...]
"""The bin of a machine for each preference."""

_FINENESS: Mapping[str, int] = {
    Property.REGION: 1,
    Property.DATACENTER: 2,
    Property.MSB: 3,
    Property.ROW: 4,
    Property.RACK: 5,
    Property.MACHINE: 6,
}


class _PreferenceState:
    """One preference while tasks are placed: the bin of each machine, and the bin's score."""

    __slots__ = (
        *("counts", "emptiest", "even", "is_machine", "is_static"),
        *("preference", "property", "unnamed"),
    )

    def __init__(self, preference: Preference) -> None:
        self.preference = preference
        self.property = preference.property
        self.is_machine = preference.property == Property.MACHINE
        self.even = EvenSpread.of(preference) if preference.weights else None
        """The weights of the bins, if they differ."""
        self.is_static = preference.strategy in STATIC and preference.at_most is None
        """Whether equally good bins count as one, named by its position among `values`."""
        self.unnamed = str(len(preference.values)) if self.is_static else ""
        """The bin of machines that no value names."""
        self.counts: dict[str, int] = defaultdict(int)
        """Tasks of the job by bin."""
        self.emptiest = None if preference.max_skew is None else EmptiestBin(self.counts)

    @property
    def only_counts(self) -> bool:
        """Whether the score of a bin is its number of tasks."""
        return self.preference.strategy is Strategy.EVEN and self.even is None

    def bin(self, machine: Candidate) -> str:
        found = bin_of(self.property, machine)
        return str(self.position(found)) if self.is_static else found

    def count(self, bin_: str) -> None:
        self.counts[bin_] += 1
        if self.emptiest is not None:
            self.emptiest.count_task(bin_)

    def position(self, bin_: str) -> int:
        values = self.preference.values
        return next((i for i, value in enumerate(values) if names(bin_, value)), len(values))

    def score(self, bin_: str) -> int:
        if self.even is not None:
            return self.even.score_of_next(bin_, self.counts[bin_])
        values = self.preference.values
        position = int(bin_) if self.is_static else self.position(bin_) if values else 0
        return SCORES[self.preference.strategy](self.counts[bin_], position, len(values))


def static_score(preference: Preference, machine: Candidate) -> int:
    """Return how good a machine is by a strategy that ignores tasks; lower is better."""
    slot = _PreferenceState(preference)
    return slot.score(slot.bin(machine))


class Ranking:
    """The preferences of one job while its tasks are placed: counts per bin, and scores.

    Machines are ordered by the first preference, equal ones by the second, and so on. The *bins* of
    a machine are its bin for each preference, in order; machines with equal bins are equally good.
    For a preference over single machines, all machines without tasks of the job that it does not
    name share an empty bin. Otherwise there would be as many bins as machines.
    """

    def __init__(self, preferences: Sequence[Preference]) -> None:
        self._slots = [_PreferenceState(preference) for preference in preferences]
        self.properties = tuple(p.property for p in preferences)
        self.by_machine = Property.MACHINE in self.properties
        """Whether single machines differ, by their tasks or by their names."""
        self.counts_machines = any(s.is_machine and not s.is_static for s in self._slots)
        """Whether single machines differ by their tasks."""
        self.named = frozenset(
            value for p in preferences if p.property == Property.MACHINE for value in p.values
        )
        """Machines that a preference names."""
        self.is_fine = any(p not in OF_BUCKETS and p != Property.MACHINE for p in self.properties)
        """Whether machines of one bucket differ."""
        self.by_size = not (NUMBERS.keys() - OF_BUCKETS).isdisjoint(self.properties)
        """Whether machines differ by their memory or disk."""
        self.is_plain = not (
            self.by_machine or self.is_fine or any(slot.is_static for slot in self._slots)
        )
        """Whether whole buckets have one bin each, with its own name."""
        self.parting = (
            self.by_size,
            tuple((s.property, tuple(s.preference.values) * s.is_static) for s in self._slots),
        )
        """The properties by which machines are partitioned into bins."""
        self.packs_machines = any(
            p.property == Property.MACHINE and p.strategy is Strategy.PACK for p in preferences
        )
        self.improves = any(p.strategy in IMPROVING for p in preferences)
        self.bounded = any(p.max_skew is not None for p in preferences)
        """Whether bins may have to wait until the emptiest bin has caught up."""
        self.capped = self.bounded or any(p.at_most is not None for p in preferences)
        self._is_default = _is_default(preferences)
        changing = [n for n, slot in enumerate(self._slots) if not slot.is_static]
        self.finest = max(changing, key=lambda n: _FINENESS.get(self.properties[n], 0), default=0)
        """Position of the preference with the finest bins: among bins that are equal in all other
        preferences, its score decides (`bin_order`)."""
        self.score = self._scorer()
        """Returns the scores of bins, one per preference; lower is better."""
        self.score_finest = self._scorer_of(self.finest)

    @property
    def begins_alike(self) -> bool:
        """Whether bins that differ by the finest preference only begin equal and only get worse."""
        slot = self._slots[self.finest]
        is_even = slot.preference.strategy is Strategy.EVEN and slot.even is None
        return is_even and not (self.improves or any(slot.counts.values()))

    @property
    def begins_evenly(self) -> bool:
        """Whether the job has the default spread, and no task is counted."""
        return self._is_default and not any(self._slots[0].counts.values())

    def bins(self, machine: Candidate) -> Bins:
        """Return the bins of a machine, including bins for its name."""
        return tuple([slot.bin(machine) for slot in self._slots])

    def common_bins(self, sample: Candidate) -> Bins:
        """Return the bins of machines without tasks that no preference names."""
        return tuple(
            [slot.bin(sample) if not slot.is_machine else slot.unnamed for slot in self._slots]
        )

    def count_task(self, machine: Candidate) -> None:
        """Count a task of the job on a machine."""
        for slot in self._slots:
            if not slot.is_static:
                slot.count(bin_of(slot.property, machine))

    def count_task_in(self, bins: Bins, machine: Candidate) -> None:
        """Count a task on a machine whose bins are known, except the one for its name."""
        for number, slot in enumerate(self._slots):
            bin_ = machine.name if slot.is_machine else bins[number]
            slot.counts[bin_] += 1
            if slot.emptiest is not None:
                slot.emptiest.count_task(bin_)

    def _scorer_of(self, number: int) -> Callable[[Bins], int]:
        if number >= len(self._slots):
            return lambda _bins: 0
        slot = self._slots[number]
        if slot.only_counts:
            counts = slot.counts
            return lambda bins: counts[bins[number]]  # the default, called three times per task
        return lambda bins: slot.score(bins[number])

    def _scorer(self) -> Callable[[Bins], Scores]:
        scorers = [self._scorer_of(number) for number in range(len(self._slots))]
        if len(scorers) == 2:
            first, second = scorers
            return lambda bins: (first(bins), second(bins))
        if all(slot.only_counts for slot in self._slots):
            tables = [slot.counts for slot in self._slots]
            return lambda bins: tuple(
                [table[bin_] for table, bin_ in zip(tables, bins, strict=True)]
            )
        return lambda bins: tuple([scorer(bins) for scorer in scorers])

    def group(self, bins: Bins) -> Bins:
        """Return the bins without the finest one."""
        return bins[: self.finest] + bins[self.finest + 1 :]

    def at_most_reached(self, bins: Bins) -> Preference | None:
        """Return the preference whose `at_most` keeps further tasks out of these bins."""
        for slot, bin_ in zip(self._slots, bins, strict=True):
            most = slot.preference.at_most
            if most is not None and slot.counts[bin_] >= most:
                return slot.preference
        return None

    def compare_bins(self, every: Sequence[Bins]) -> None:
        """Set the bins among which the emptiest one is found, for bounds of skew."""
        for number, slot in enumerate(self._slots):
            if slot.emptiest is not None:
                slot.emptiest.set_bins(bins[number] for bins in every)

    def floors(self) -> list[int | None]:
        """Return the tasks of the emptiest bin for each bound of skew."""
        return [slot.emptiest.tasks for slot in self._slots if slot.emptiest is not None]

    def max_skew_reached(self, bins: Bins) -> Preference | None:
        """Return the preference whose `max_skew` makes these bins wait for the emptiest one."""
        for slot, bin_ in zip(self._slots, bins, strict=True):
            most = slot.preference.max_skew
            if (
                most is not None
                and slot.emptiest is not None
                and slot.emptiest.is_ahead(bin_, most)
            ):
                return slot.preference
        return None

    def limits_reached(self, machine: Candidate) -> list[str]:
        """Describe the bounds that keep a task off a machine."""
        bins, found = self.bins(machine), []
        if (full := self.at_most_reached(bins)) is not None and full.at_most is not None:
            found.append(f"{full.property} would get {full.at_most + 1} tasks > {full.at_most}")
        if (ahead := self.max_skew_reached(bins)) is not None:
            kind, most = ahead.property, ahead.max_skew
            found.append(f"{kind} would be more than {most} tasks ahead of the emptiest {kind}")
        return found


def _is_default(preferences: Sequence[Preference]) -> bool:
    """Return whether preferences mean the same as `DEFAULT`."""
    return [p.property for p in preferences] == [p.property for p in DEFAULT] and all(
        p.strategy is Strategy.EVEN and p.at_most is p.max_skew is None and not p.weights
        for p in preferences
    )


def preferences_of(spec: JobSpec, entitlement: EntitlementSpec | None) -> tuple[Preference, ...]:
    """Return the preferences of a job, else of its entitlement, followed by the default spread."""
    if spec.preferences is not None:
        return spread_by_default(spec.preferences)
    if entitlement is not None and entitlement.preferences is not None:
        return spread_by_default(entitlement.preferences)
    return DEFAULT


def spread_by_default(own: Sequence[Preference]) -> tuple[Preference, ...]:
    """Return preferences followed by those of `DEFAULT` that they do not replace.

    An `even` or `pack` over the same property replaces one of them; an empty list replaces all.
    """
    replaced = {p.property for p in own if p.strategy not in STATIC}
    return (*own, *(p for p in DEFAULT if p.property not in replaced)) if own else ()
