"""How long a machine that came back must answer before it is trusted with tasks again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrustRules:
    """How long a machine must answer after repeated failures, in seconds."""

    first_s: float
    """Probation after the second failure; it doubles with each further failure."""
    most_s: float
    """The longest probation."""
    forget_s: float
    """One failure is dropped after each period of this length without another failure."""


@dataclass(frozen=True, slots=True)
class Failures:
    """A machine's failures that still count."""

    count: int = 0
    last_at: float = 0.0
    """When it was last declared down, by `Runtime.now()`."""


NO_FAILURES = Failures()


def with_failure(known: Failures, now: float, rules: TrustRules) -> Failures:
    """Return a machine's failures with one more, now."""
    return Failures(counted_failures(known, now, rules) + 1, now)


def failures_from_ages(ages_s: Iterable[float], now: float, rules: TrustRules) -> Failures:
    """Return a machine's failures from their ages in its record, as after a restart.

    A failure in the future counts as of now: the wall clock was set back.
    """
    known = NO_FAILURES
    for age_s in sorted(ages_s, reverse=True):
        known = with_failure(known, now - max(0.0, age_s), rules)
    return known


def counted_failures(known: Failures, now: float, rules: TrustRules) -> int:
    """Return how many failures still count."""
    return max(0, known.count - int((now - known.last_at) / rules.forget_s))


def probation_s(known: Failures, now: float, rules: TrustRules) -> float:
    """Return how long the machine must answer before it is up; a first failure adds nothing."""
    count = counted_failures(known, now, rules)
    if count < 2:
        return 0.0
    return float(min(rules.most_s, rules.first_s * 2 ** min(count - 2, 30)))
