"""The article's figures 4, 6, 7 and 8 in the simulated region, with checks of the numbers.

`python -m tests.bench.intent_figures --out FOLDER` draws them.
"""

from __future__ import annotations

import pytest

from tests.bench.intent_figures import (
    Course,
    a_runtime_rolled_out,
    figures_of,
    half_of_a_push,
    models,
    sizes_of,
    svg_of,
    untested,
)

JOBS = 40


@pytest.fixture(scope="module")
def composed() -> Course:
    return half_of_a_push()


@pytest.mark.behaviour("JC5", "JC6", "JC10")
def test_figure_6_half_stays_half_at_every_size_with_a_canary(composed: Course) -> None:
    assert composed.broken == []
    assert sizes_of(composed) == {
        "pushed": {"old": 50, "pushed": 50},
        "with a canary": {"old": 48, "pushed": 50, "canary": 2},
        "of 50": {"old": 23, "pushed": 25, "canary": 2},
        "of 75": {"old": 35, "pushed": 38, "canary": 2},
        "without": {"old": 37, "pushed": 38},
        "all": {"pushed": 75},
    }


@pytest.mark.behaviour("JC5")
def test_figure_4_the_first_tasks_become_all_of_a_smaller_job() -> None:
    """The negative control; the checker reports what is wrong."""
    old_way = half_of_a_push(old_way=True)
    assert "share" in old_way.broken
    sizes = sizes_of(old_way)
    assert sizes["pushed"] == {"old": 50, "pushed": 50}
    assert sizes["of 50"] == {"pushed": 50}  # half was requested, all of it has the push


@pytest.mark.behaviour("JC9")
def test_figure_7_a_runtime_waits_for_the_next_push() -> None:
    """The old way put the runtime on half of the job before any stage had tried it there."""
    course = a_runtime_rolled_out()
    assert course.broken == []
    assert untested(course) == 0
    assert course.at(2390.0) == {"second push, r3": 40}
    old_way = a_runtime_rolled_out(old_way=True)
    assert untested(old_way) == 20
    assert "runtime" in old_way.broken


@pytest.mark.behaviour("JC12", "SC21")
def test_figure_8_a_shared_buffer_serves_as_well_as_twice_the_tasks() -> None:
    """All jobs get a push and all machines a new kernel, and each job serves."""
    both, shared = models(JOBS, tasks=2, buffer=0), models(JOBS, tasks=1, buffer=8)
    assert both.broken == shared.broken == []
    doubled, figures = figures_of(both, JOBS), figures_of(shared, JOBS)
    assert doubled["jobs_serving_least"] == figures["jobs_serving_least"] == JOBS
    assert figures["tasks_usual"] == JOBS
    assert JOBS < figures["tasks_most"] <= JOBS + 8
    assert figures["machines_most"] <= 0.7 * doubled["machines_most"]  # the article: 30 % less
    assert figures["push_s"] > 0


@pytest.mark.behaviour("JC12")
def test_figure_8_a_single_task_has_downtime() -> None:
    """The negative control."""
    alone = figures_of(models(JOBS, tasks=1, buffer=0), JOBS)
    assert alone["jobs_serving_least"] < JOBS


def test_the_curves_can_be_read(composed: Course) -> None:
    picture = svg_of("Half of the job", composed, ("old", "pushed", "canary"))
    assert picture.count("<polyline") == 3
    assert picture.startswith("<svg ")
