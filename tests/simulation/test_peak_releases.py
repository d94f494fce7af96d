"""A release by the conveyor is slower at the peak, and breaks no rule."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from conveyor.runs import RunState
from tests.bench.peak_releases import simulated, svg_of

pytestmark = pytest.mark.behaviour("TC14")


@pytest.mark.behaviour("TC14", "CV4")
def test_a_release_at_the_peak_takes_longer_without_a_person() -> None:
    """Capacity is short at six in the evening, and is not at six in the morning."""
    day = simulated(8, hours=20.0, at=(6, 18))
    morning, evening = day.took_s().values()
    assert evening > 1.5 * morning
    assert {run.state for run in day.runs} == {RunState.DONE}
    assert day.violations == []
    assert ET.fromstring(svg_of(day)).tag.endswith("svg")
