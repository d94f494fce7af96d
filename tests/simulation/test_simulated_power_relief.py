"""Places that draw too much power are relieved before power is capped, and after it.

The four events of the paper's account (§5.2) hit one MSB (`tests/bench/rebalance_power.py`).
"""

from __future__ import annotations

import pytest

from control_plane.api.settings import RebalanceMode
from tests.bench.rebalance_power import BUDGET_W, figures_of, picture, played

pytestmark = pytest.mark.behaviour("RE6", "HC13", "WH10")


@pytest.mark.behaviour("RE6", "HC13", "WH10", "AL22")
def test_four_events_cap_power_without_the_rebalancer_and_not_with_it() -> None:
    """Checks the numbers of docs/rebalancing.md."""
    without, with_it = played(RebalanceMode.OFF), played(RebalanceMode.APPLY)
    left, right = figures_of(without), figures_of(with_it)

    assert left["machines_capped"] > 0
    assert left["over_budget_s"] > 0
    assert left["most_drawn_w"] > BUDGET_W
    assert (right["machines_capped"], right["over_budget_s"]) == (0, 0)
    assert right["most_drawn_w"] <= BUDGET_W
    assert right["moves"] > 0
    assert picture({"without": without, "with": with_it}).count("<polyline") == 2


@pytest.mark.behaviour("HC13", "WH10")
def test_once_power_was_capped_tasks_leave_and_the_place_is_below_its_budget() -> None:
    """Capping itself stops no task; moves bring the draw below the budget."""
    late = figures_of(played(RebalanceMode.APPLY, late=True))

    assert late["machines_capped"] > 0
    assert late["drawn_at_the_end_w"] <= BUDGET_W
    assert late["moves"] > 0
