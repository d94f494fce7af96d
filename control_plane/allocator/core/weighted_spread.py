"""Even spread: how many tasks the bins of a property should have, by their weights.

Bins of equal weight have equally many tasks. With weights tasks go by Sainte-Laguë's rule, as the
seats of some parliaments do: the next one goes to the bin in which (2 × tasks + 1) / weight is
least. It favours neither heavy bins nor light ones (M. L. Balinski, H. P. Young, *Fair
Representation*, 1982). Without weights it selects the bin with fewest tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane.api.policy import Preference, Property
from control_plane.broker.core.matching import names

_EXACT = 10**12
"""Weights are at most 1,000, so two quotients that differ do so by a millionth or more."""


@dataclass(frozen=True, slots=True)
class Even:
    """A property over whose bins tasks are spread, and the weight of each bin."""

    property: str
    weights: tuple[tuple[str, int], ...] = ()
    """Bin, as the user wrote it → weight; others have weight 1."""
    before: tuple[Preference, ...] = ()
    """Preferences that matter more: a move to even out tasks must not harm them."""
    _known: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(preference: Preference, before: tuple[Preference, ...] = ()) -> Even:
        """Return the spread that an `even` preference asks for."""
        return Even(preference.property, tuple(sorted(preference.weights.items())), before)

    def weight(self, bin_: str) -> int:
        """Return the weight of a bin."""
        if not self.weights:
            return 1
        found = self._known.get(bin_)
        if found is None:
            found = next((w for value, w in self.weights if names(bin_, value)), 1)
            self._known[bin_] = found
        return found

    def next(self, bin_: str, tasks: int) -> int:
        """Return how good a bin with so many tasks is for one more; lower is better."""
        return (2 * tasks + 1) * _EXACT // self.weight(bin_)

    def last(self, bin_: str, tasks: int) -> int:
        """Return how good it was for the last of its tasks; higher: rather take one away there."""
        return (2 * tasks - 1) * _EXACT // self.weight(bin_)


OVER_MSBS = Even(Property.MSB)
