"""Silence of machines to verdicts: which are down, and when to doubt oneself instead.

One machine that does not answer is down. Many at once are more likely a cut between them
and this process: then nothing is declared down, and so nothing moves, until the silence
outlasts a grace or an operator decides (trust: F-49, F-51).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signs:
    """What is known of one machine's life."""

    silent_s: float
    """Since its agent answered last, or since this process began to ask."""
    down_for_s: float | None = None
    """Since it was declared down; None: it is not."""
    excused: bool = False
    """It reboots because it was told to, and its deadline is not over."""


@dataclass(frozen=True, slots=True)
class BrakePolicy:
    """When silence counts, in seconds, and how much of it at once is suspicious."""

    down_after_s: float
    share: float
    window_s: float
    grace_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to believe now."""

    down: tuple[str, ...] = ()
    """Machines to declare down."""
    suspect: tuple[str, ...] = ()
    """Silent machines that the brake holds back."""
    reason: str = ""


def judge(machines: Mapping[str, Signs], policy: BrakePolicy) -> Verdict:
    """Return which machines to declare down.

    Machines cut off together cross the limit one after another; so that the first does not
    pass for a single loss, all that are silent for half of the limit count as lost too.
    """
    silent = {n: s for n, s in machines.items() if s.down_for_s is None and not s.excused}
    due = sorted(n for n, s in silent.items() if s.silent_s >= policy.down_after_s)
    if not due:
        return Verdict()
    worrying = sum(1 for s in silent.values() if s.silent_s >= policy.down_after_s / 2)
    fresh = sum(
        1 for s in machines.values() if s.down_for_s is not None and s.down_for_s < policy.window_s
    )
    total = sum(
        1 for s in machines.values() if s.down_for_s is None or s.down_for_s < policy.window_s
    )
    lost = worrying + fresh
    if lost <= 1 or lost <= policy.share * total:
        return Verdict(down=tuple(due))
    overdue = tuple(n for n in due if machines[n].silent_s >= policy.grace_s)
    return Verdict(
        down=overdue,
        suspect=tuple(n for n in due if n not in overdue),
        reason=f"{lost} of {total} machines went silent together, more than"
        f" {policy.share:.0%}: this control plane may be the one that is cut off; nothing moves"
        f" until they have been silent for {policy.grace_s:g} s",
    )
