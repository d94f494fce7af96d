"""Even spread: how many tasks the bins of a property should have, by their weights.

Bins of equal weight get the same number of tasks. Weights are used by Sainte-Laguë's rule, like
the votes for seats of some parliaments: the next task goes to the bin with the least
(2 × tasks + 1) / weight. The rule favours neither heavy nor light bins (M. L. Balinski, H. P.
Young, *Fair Representation*, 1982). Without weights it selects the bin with the fewest tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane.api.policy import Preference, Property
from control_plane.broker.core.matching import names

_EXACT = 10**12
"""Weights are at most 1,000, so two quotients that differ do so by a millionth or more."""


@dataclass(frozen=True, slots=True)
class EvenSpread:
    """A property over whose bins tasks are spread, and the weight of each bin."""

    property: str
    weights: tuple[tuple[str, int], ...] = ()
    """(bin as the user wrote it, weight); other bins have weight 1."""
    higher_ranked: tuple[Preference, ...] = ()
    """Preferences of higher rank, which a move for this spread must not harm."""
    _weights_found: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(preference: Preference, higher_ranked: tuple[Preference, ...] = ()) -> EvenSpread:
        """Return the spread of an `even` preference."""
        return EvenSpread(
            preference.property, tuple(sorted(preference.weights.items())), higher_ranked
        )

    def weight(self, bin_: str) -> int:
        """Return the weight of a bin."""
        if not self.weights:
            return 1
        found = self._weights_found.get(bin_)
        if found is None:
            found = next((w for value, w in self.weights if names(bin_, value)), 1)
            self._weights_found[bin_] = found
        return found

    def score_of_next(self, bin_: str, tasks: int) -> int:
        """Return the score of a bin with `tasks` tasks for one more task; lower is better."""
        return (2 * tasks + 1) * _EXACT // self.weight(bin_)

    def score_of_last(self, bin_: str, tasks: int) -> int:
        """Return the score that a bin had for its last task; the highest loses a task first."""
        return (2 * tasks - 1) * _EXACT // self.weight(bin_)


OVER_MSBS = EvenSpread(Property.MSB)
