"""Shortens a failing story: fewer events, then shorter and earlier ones.

Delta debugging (Zeller and Hildebrandt, 2002) over the events. A shorter story is kept if it
breaks the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vm_lab.region.scenario import Scenario
from vm_lab.region.seed import SeedOutcome, run_seed
from vm_lab.region.story import Fault, changed_event

Breaks = Callable[[Sequence[Fault]], bool]


def shrink(scenario: Scenario, seed: int, outcome: SeedOutcome, runs: int = 150) -> SeedOutcome:
    """Return the outcome of the shortest story that still breaks the rule that broke first.

    At most `runs` stories are tried.
    """
    rule = outcome.violations[0].rule
    best, left = outcome, runs

    def breaks(story: Sequence[Fault]) -> bool:
        nonlocal best, left
        if left <= 0:
            return False
        left -= 1
        tried = run_seed(scenario, seed, story)
        if any(violation.rule == rule for violation in tried.violations):
            best = tried
            return True
        return False

    last = max(v.at for v in outcome.violations if v.rule == rule) - outcome.story_at
    story = [fault for fault in outcome.story if fault.at <= last]
    if len(story) == len(outcome.story) or not breaks(story):
        story = list(outcome.story)
    shorten_events(drop_events(story, breaks), breaks)
    return best


def drop_events(story: list[Fault], breaks: Breaks) -> list[Fault]:
    """Return a part of the story that still breaks the rule, and needs each of its events."""
    parts = 2
    while len(story) >= 2:
        size = max(1, len(story) // parts)
        for begin in range(0, len(story), size):
            rest = story[:begin] + story[begin + size :]
            if rest and breaks(rest):
                story, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                return story
            parts = min(len(story), parts * 2)
    return story if not story or not breaks([]) else []


def shorten_events(story: list[Fault], breaks: Breaks) -> list[Fault]:
    """Return the story with shorter and earlier events that still breaks the rule."""
    for number, fault in enumerate(story):
        for share in (0.125, 0.25, 0.5):
            seconds = round(fault.seconds * share, 1)
            if seconds <= 0:
                continue
            tried = [*story[:number], changed_event(fault, seconds=seconds), *story[number + 1 :]]
            if breaks(tried):
                story = tried
                break
    if story and story[0].at > 10.0:
        moved = [changed_event(fault, at=round(fault.at - story[0].at + 1.0, 1)) for fault in story]
        if breaks(moved):
            story = moved
    return story
