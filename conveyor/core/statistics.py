"""The test of a `compare` gate: one-sided Mann-Whitney U with a tolerance.

The null hypothesis is that values of new tasks are not larger than those of stable tasks after the
stable ones were worsened by the tolerance. U is compared with its normal approximation, corrected
for ties and for continuity. The test needs no assumption about the distribution of the values; it
assumes that samples are independent. Samples of one series close in time are not, so the step
between samples must not be below the scrape interval, and the significance is nominal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import erf, sqrt
from statistics import median


@dataclass(frozen=True, slots=True)
class TestResult:
    """The result of the test."""

    __test__ = False

    p: float
    """Probability of values at least as bad if new tasks were no worse than tolerated."""
    new_median: float
    stable_median: float


def p_greater(values: Sequence[float], reference: Sequence[float]) -> float:
    """Return the one-sided p-value of "`values` are larger than those of `reference`".

    Both must hold at least one value. Mann and Whitney (1947), normal approximation.
    """
    n1, n2 = len(values), len(reference)
    pooled = sorted([*values, *reference])
    first_index: dict[float, int] = {}
    for index, value in enumerate(pooled):
        first_index.setdefault(value, index)
    counts = Counter(pooled)
    rank = {value: first_index[value] + (count + 1) / 2 for value, count in counts.items()}
    u = sum(rank[value] for value in values) - n1 * (n1 + 1) / 2
    n = n1 + n2
    ties = sum(count**3 - count for count in counts.values())
    variance = n1 * n2 / 12 * ((n + 1) - ties / (n * (n - 1)))
    if variance <= 0:  # all values are equal
        return 1.0
    z = (u - n1 * n2 / 2 - 0.5) / sqrt(variance)
    return 0.5 * (1 - erf(z / sqrt(2)))


def compare_samples(
    new: Sequence[float], stable: Sequence[float], tolerance: float, *, lower_is_better: bool
) -> TestResult:
    """Test whether the new values are worse than the stable ones by more than `tolerance`."""
    sign = 1.0 if lower_is_better else -1.0
    tolerated = [sign * value + abs(value) * tolerance for value in stable]
    p = p_greater([sign * value for value in new], tolerated)
    return TestResult(p, median(new), median(stable))
