"""The conveyor in regions with faults, with an autoscaler and an operator.

The rules of the region hold, no wrong image gets beyond its canary, and every run ends. Bugs that
are planted into the conveyor and into job control are found. More seeds: `twine-lab region run
delivery --seeds 1..500`.
"""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from control_plane.api.intent_changes import PushChange
from control_plane.api.intents import PushIntent
from conveyor.core import acts, evaluation, stages
from conveyor.core.acts import DeliveryAct
from conveyor.push import push_change
from vm_lab.region import delivery, scenario
from vm_lab.region.results import as_story
from vm_lab.region.run import Job, run_one

pytestmark = pytest.mark.behaviour("CV1", "CV2", "CV4", "CV5", "JC15")

SLICE = range(1, 21)
MOST = 30


def broken_by(rules: set[str]) -> int:
    """Return the first seed of the scenario that breaks one of the rules."""
    chosen = scenario.load("delivery")
    for seed in range(1, MOST + 1):
        outcome = run_one(Job(chosen, seed))
        if rules & {violation.rule for violation in outcome.violations}:
            return seed
    raise AssertionError(f"none of {MOST} seeds breaks {' or '.join(sorted(rules))}")


@pytest.mark.behaviour("CV1", "CV2", "CV4", "CV5")
def test_good_images_arrive_and_bad_ones_stop_at_the_canary_under_faults() -> None:
    """Covers several releases within half an hour; no budget is broken."""
    outcomes = [run_one(Job(scenario.load("delivery"), seed)) for seed in SLICE]
    broken = [outcome for outcome in outcomes if not outcome.ok]
    assert not broken, "\n".join(as_story(outcome) for outcome in broken)
    runs = Counter[str]()
    for outcome in outcomes:
        runs.update({k: n for k, n in outcome.figures.items() if k.startswith("runs ")})
    assert runs["runs done"] > len(outcomes)
    assert runs["runs rolled-back"] > len(outcomes) / 2


def test_a_canary_stage_that_is_pushed_to_all_tasks_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = PushIntent(version=0)
    monkeypatch.setattr(stages, "push_of", lambda _: whole)
    monkeypatch.setattr(acts, "push_of", lambda _: whole)
    monkeypatch.setattr(
        delivery,
        "push_change",
        lambda act: replace(push_change(act), share=1.0, tasks=None),
    )
    assert broken_by({"canary"}) <= MOST


def test_an_ignored_gate_failure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_fails", lambda *_: False)
    monkeypatch.setattr(evaluation, "_has_passed", lambda *_: True)
    assert broken_by({"canary", "delivered"}) <= MOST


def test_a_count_of_tasks_that_is_read_as_all_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier rule of job control: a push is always a share."""
    monkeypatch.setattr(PushIntent, "of", lambda push, size: size)
    assert broken_by({"canary"}) <= MOST


def test_a_push_that_is_never_released_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(act: DeliveryAct) -> PushChange:
        return replace(push_change(act), gives_back=False)  # type: ignore[arg-type]

    monkeypatch.setattr(delivery, "push_change", kept)
    assert broken_by({"rest"}) <= MOST
