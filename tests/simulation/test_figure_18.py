"""The paper's Figure 18 on the real control plane: sizes that follow load move machines.

Small: two services of six machines each; `python -m tests.bench.figure_18 --out FOLDER` draws it.
"""

from __future__ import annotations

import pytest

from tests.bench.figure_18 import ALM, OTHER, Flow, replayed, svg_of


@pytest.fixture(scope="module")
def flow() -> Flow:
    return replayed(2.0, 6)


@pytest.mark.behaviour("HP11", "AS2", "AS3")
def test_machines_go_to_alm_services_as_users_come_and_back_as_they_go(flow: Flow) -> None:
    """Machines arrive in hours 3 to 8 and return in hours 13 to 20; hardly any at other hours."""
    assert flow.violations == []
    to_alm, back = flow.between(ALM, 3, 9), flow.between(OTHER, 13, 21)
    assert to_alm >= 2
    assert back >= 2
    assert to_alm == flow.changed[ALM].total()
    assert back == flow.changed[OTHER].total()


@pytest.mark.behaviour("EX17")
def test_a_machine_changes_its_profile_less_than_once_in_a_day(flow: Flow) -> None:
    """The paper's fleet has one change in two days."""
    assert flow.figures()["days between two changes of a machine"] > 1.0


def test_the_picture_has_bars_of_both_kinds(flow: Flow) -> None:
    picture = svg_of(flow)
    assert picture.count("<rect") == 49
    assert "to ALM services" in picture
