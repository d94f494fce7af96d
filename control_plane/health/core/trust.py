"""How long a machine that came back must answer before it is trusted with tasks again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """How distrust grows and fades, in seconds."""

    first_s: float
    """Time of trial after the second failure; it doubles with each further failure."""
    most_s: float
    """The longest time of trial."""
    forget_s: float
    """One failure is dropped after each period of this length without another failure."""


@dataclass(frozen=True, slots=True)
class Failures:
    """A machine's failures that still count."""

    count: int = 0
    last_at: float = 0.0
    """When it was last declared down, by `Runtime.now()`."""


NO_FAILURES = Failures()


def failed_again(known: Failures, now: float, patience: Patience) -> Failures:
    """Return a machine's failures with one more, now."""
    return Failures(remembered(known, now, patience) + 1, now)


def recalled(ages_s: Iterable[float], now: float, patience: Patience) -> Failures:
    """Return a machine's failures from their ages in its record.

    So a restart of this process loses none. A failure in the future (the wall clock was set back)
    counts as of now.
    """
    known = NO_FAILURES
    for age_s in sorted(ages_s, reverse=True):
        known = failed_again(known, now - max(0.0, age_s), patience)
    return known


def remembered(known: Failures, now: float, patience: Patience) -> int:
    """Return how many failures still count."""
    return max(0, known.count - int((now - known.last_at) / patience.forget_s))


def probation_s(known: Failures, now: float, patience: Patience) -> float:
    """Return how long the machine must answer before it is up; a first failure adds nothing."""
    count = remembered(known, now, patience)
    if count < 2:
        return 0.0
    return float(min(patience.most_s, patience.first_s * 2 ** min(count - 2, 30)))
