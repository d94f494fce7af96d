"""Loans in simulated regions whose owners grow, fail, update and are killed.

Every rule of the checker holds, and each lent machine is returned within its promise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from control_plane.elastic.core import matching
from vm_lab.region import scenario
from vm_lab.region.run import Job, run_one
from vm_lab.region.seed import SimulatedRegion, draw

pytestmark = pytest.mark.behaviour("EL1", "EL2")

LOANS = scenario.load("loans")


@contextmanager
def silent() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@pytest.mark.parametrize("seed", range(1, 5))
def test_owners_have_their_machines_back_as_promised(seed: int) -> None:
    lent = set[str]()

    def passed(_: float) -> None:
        serving = region.plane.serving
        if serving is not None:
            lent.update(record.machine for record in serving.inventory.loans.lent())

    region = SimulatedRegion(LOANS, seed, passed)
    with silent():
        region.run(list(draw(LOANS, seed)))
    assert list(map(str, region.checker.violations)) == []
    assert lent
    assert region.checker.loans_revoked > 0


def test_the_same_seed_does_the_same() -> None:
    one, two = run_one(Job(LOANS, 5)), run_one(Job(LOANS, 5))
    assert one.digest == two.digest


@pytest.mark.behaviour("EL2")
def test_a_deadline_beyond_the_promise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds soon find the bug, which is planted by substitution."""
    monkeypatch.setattr(matching, "MARGIN_S", -60.0)
    for seed in range(1, 21):
        outcome = run_one(Job(LOANS, seed))
        if any(violation.rule == "promise" for violation in outcome.violations):
            return
    raise AssertionError("none of 20 seeds breaks the promise")
