"""Counts of machines and tasks for a scrape, which does not iterate over them."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from virtual_time import run
from world import World, a_job, a_region

from control_plane.api.routes import ROUTES
from control_plane.front_end.metrics import Metrics


def scraped(w: World, name: str) -> dict[str, float]:
    """Return the samples of a metric with one label, without those that are 0."""
    cp = w.cp
    metrics = Metrics(ROUTES, cp)
    text = metrics.text().decode()
    return {
        next(iter(sample.labels.values()), ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.value
    }


@pytest.mark.behaviour("HC3")
def test_a_scrape_counts_machines_by_state_and_tasks_by_phase_after_a_restart_too():
    """It also counts the share of healthy machines, as the health check service sees it."""

    async def main() -> None:
        w = World(a_region())
        async with w.running():
            assert scraped(w, "twine_machines") == scraped(w, "twine_tasks") == {}
            assert scraped(w, "twine_fleet_health_ratio") == {"": 1.0}
            await w.deployed(a_job(7))
            assert scraped(w, "twine_machines") == {"up": 3}
            assert scraped(w, "twine_tasks") == {"running": 7}
            w.region.machines["m1"].power_off()
            await w.until(lambda: scraped(w, "twine_machines") == {"up": 2, "down": 1})
            await w.until(lambda: scraped(w, "twine_tasks") == {"running": 7})
            assert scraped(w, "twine_fleet_health_ratio") == {"": 2 / 3}
        again = World(w.region, w.store)
        async with again.running():
            assert scraped(again, "twine_machines") == {"up": 2, "down": 1}
            assert scraped(again, "twine_tasks") == {"running": 7}
            await again.cp.stop_job("web")
            await again.until(lambda: scraped(again, "twine_tasks") == {})

    run(main())
