"""A pipeline file: every violation at once; times, windows and the test of a compare gate."""

from __future__ import annotations

import random
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Exit, TaskState
from control_plane.api.jobs import JobRecord, JobSpec, TaskRecord
from control_plane.cli.pipeline_gantt import gantt_svg
from conveyor.api import CompareGate, HealthGate, PipelineSpec, QueryGate
from conveyor.cli import main
from conveyor.command_checks import outcome_of
from conveyor.core import evaluation, schedule
from conveyor.core.stages import steps
from conveyor.core.statistics import compare_samples, p_greater
from conveyor.core.status_page import status_lines
from conveyor.pipeline_file import pipeline_relations, pipeline_spec
from conveyor.runs import GateOutcome, JobProgress
from tests.unit.conveyor.delivery_model import World, a_pipeline, digest
from wire.errors import InvalidInput

FRIDAY_7 = 1_799_996_400.0  # 2027-01-15, 07:00 UTC
BAD = {
    "name": "web",
    "jobs": ["web", "web"],
    "stages": [
        {"kind": "percent", "percent": 50, "tasks": 1, "gates": ["missing"]},
        {"kind": "canary", "soak_s": "5d"},
        {"kind": "percent", "percent": 20},
    ],
    "gates": {
        "two": {"query": {"promql": "x"}, "health": {}},
        "same": {"compare": {"promql": "up"}},
    },
    "trigger": {"schedule": ["someday"], "zone": "Mars/Base"},
    "windows": {"during": ["always"]},
    "holds": [{"begin": "2026-01-02T00:00:00Z", "end": "2026-01-01T00:00:00Z", "reason": "r"}],
    "colour": "red",
}


def test_every_violation_of_a_file_is_reported_at_once():
    with pytest.raises(InvalidInput) as caught:
        pipeline_spec(BAD, "web.toml")
    found = {e.field: e.reason for e in caught.value.errors}
    assert set(found) >= {
        "colour",
        "jobs",
        "stages",
        "stages[0].tasks",
        "stages[0].gates",
        "stages[1].tasks",
        "stages[2].kind",
        "stages[2].percent",
        "gates.two",
        "gates.two.query",
        "gates.same.compare.promql",
        "trigger.schedule[0]",
        "trigger.zone",
        "trigger.image",
        "windows.during",
        "holds[0].end",
    }
    assert "must contain $tasks" in found["gates.same.compare.promql"]
    assert caught.value.hint


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["stages", "gates", "jobs", "kind", "query", "trigger", "holds", "x"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_no_document_makes_the_check_fail_itself(document: object):
    assert isinstance(pipeline_relations(document), list)


@pytest.mark.behaviour("BUG-CP153")
@pytest.mark.parametrize("key", ["jobs", "fleets"])
def test_a_target_is_named_once(key: str):
    with pytest.raises(InvalidInput) as caught:
        pipeline_spec({"name": "x", key: ["a", "a"], "stages": [{"kind": "all"}]}, "x.toml")
    assert [(e.field, e.reason) for e in caught.value.errors] == [(key, "named twice: a")]


def test_a_file_read_from_disk_is_valid_on_the_wire():
    spec = a_pipeline()
    plain = msgspec.json.decode(msgspec.json.encode(spec))
    assert pipeline_relations(plain) == []
    assert msgspec.convert(plain, PipelineSpec) == spec


def test_check_reads_a_file_without_a_service(tmp_path):
    file = tmp_path / "web.toml"
    file.write_text('name = "web"\njobs = ["web"]\n[[stages]]\nkind = "all"\n')
    result = CliRunner().invoke(main, ["check", str(file)])
    assert (result.exit_code, "pipeline web, 1 stages, 1 jobs" in result.output) == (0, True)
    file.write_text('name = "web"\n')
    result = CliRunner().invoke(main, ["check", str(file)])
    assert (result.exit_code, "missing" in result.output) == (64, True)


def test_jobs_in_order_have_all_stages_one_after_the_other():
    spec = a_pipeline(jobs=["a", "b"])
    assert [s.name for s in steps(spec)][:4] == ["a: canary 1", "a: 50 %", "a: all", "b: canary 1"]
    together = a_pipeline(jobs=["a", "b"], order="together")
    assert [s.jobs for s in steps(together)] == [("a", "b")] * 3


@pytest.mark.parametrize(
    ("text", "hours_back"),
    [("fri 07:00", 0), ("06:30", 0.5), ("mon-thu 10:00", 21), ("fri 07:01", 7 * 24 - 1 / 60)],
)
def test_the_last_scheduled_start_is_found(text: str, hours_back: float):
    found = schedule.last_start([text], "UTC", FRIDAY_7)
    assert found == pytest.approx(FRIDAY_7 - hours_back * 3600)


def test_a_hold_and_a_window_keep_stages_back_with_their_reason():
    hold = {"begin": "2027-01-15T00:00:00Z", "end": "2027-01-16T00:00:00Z", "reason": "audit"}
    assert schedule.block_reason(a_pipeline(holds=[hold]), FRIDAY_7).endswith("audit")
    spec = a_pipeline(windows={"during": ["mon-fri 09:00-17:00"], "zone": "Europe/Berlin"})
    assert "outside of its windows" in schedule.block_reason(spec, FRIDAY_7)
    assert schedule.block_reason(spec, FRIDAY_7 + 3600) == ""


# -- the statistical test


def test_the_p_value_is_that_of_the_published_test():
    """Computed by hand: U = 25 of 25, mean 12.5, variance 275/12, continuity 0.5: z = 2.507, p =
    0.0061."""
    assert p_greater([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(0.9967, abs=1e-4)
    assert p_greater([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]) == pytest.approx(0.0061, abs=1e-4)
    assert p_greater([1, 1, 1], [1, 1, 1]) == 1.0


def test_false_alarms_match_the_significance_and_a_worse_version_is_found():
    chance = random.Random(29)
    alarms = found = 0
    for _ in range(400):
        stable = [chance.expovariate(10) for _ in range(30)]
        same = [chance.expovariate(10) for _ in range(30)]
        slower = [chance.expovariate(4) for _ in range(30)]
        alarms += compare_samples(same, stable, 0.0, lower_is_better=True).p < 0.05
        found += compare_samples(slower, stable, 0.1, lower_is_better=True).p < 0.05
    assert alarms <= 40
    assert found >= 320


@given(st.lists(st.floats(0, 1e6), min_size=5, max_size=30), st.floats(1, 1e3))
def test_worse_values_never_look_better(values: list[float], more: float):
    one = compare_samples(values, values, 0.0, lower_is_better=True)
    other = compare_samples([v + more for v in values], values, 0.0, lower_is_better=True)
    assert other.p <= one.p
    assert (
        compare_samples(values, [v + more for v in values], 0.0, lower_is_better=False).p <= one.p
    )


def test_a_difference_within_the_tolerance_passes_with_any_number_of_samples():
    stable = [1.0 + n / 1e4 for n in range(1000)]
    new = [value * 1.08 for value in stable]
    assert compare_samples(new, stable, 0.1, lower_is_better=True).p > 0.9
    assert compare_samples(new, stable, 0.05, lower_is_better=True).p < 1e-6
    assert compare_samples(stable, new, 0.1, lower_is_better=False).p > 0.9


def test_gates_without_numbers_have_no_data():
    assert (
        evaluation.evaluate_query(QueryGate(promql="x", at_most=1), []).outcome
        is GateOutcome.NO_DATA
    )
    nan = evaluation.evaluate_query(QueryGate(promql="x", at_most=1), [("a", float("nan"))])
    assert nan.outcome is GateOutcome.NO_DATA
    few = evaluation.evaluate_comparison(
        CompareGate(promql="$tasks", samples=5), [1.0] * 4, [1.0] * 50
    )
    assert few.outcome is GateOutcome.NO_DATA
    assert few.numbers == {"new_samples": 4, "stable_samples": 50}
    none = evaluation.evaluate_health(HealthGate(), [JobProgress(job="web", size=3)], 0)
    assert none.outcome is GateOutcome.NO_DATA


@pytest.mark.parametrize(
    ("value", "outcome"), [(0.5, "fail"), (1.0, "pass"), (2.0, "pass"), (2.1, "fail")]
)
def test_a_query_passes_within_its_bounds(value: float, outcome: str):
    gate = QueryGate(promql="x", at_most=2, at_least=1)
    assert evaluation.evaluate_query(gate, [("web-0", value), ("web-1", 1.5)]).outcome == outcome


def test_restarts_before_the_stage_do_not_count():
    seen = [JobProgress(job="web", size=3, new=1, new_healthy=1, restarts=5)]
    assert evaluation.evaluate_health(HealthGate(), seen, 5).outcome is GateOutcome.PASS
    assert evaluation.evaluate_health(HealthGate(), seen, 4).outcome is GateOutcome.FAIL


# -- what users see


async def test_the_status_is_a_page_and_the_history_a_drawing():
    world = await World().begin()
    world.plane.images["web"] = digest(2)
    await world.rounds(5)
    lines = status_lines(await world.service.view("web"))
    assert lines[0].startswith("pipeline web: run 1 of image")
    assert any("soaks" in line for line in lines)
    assert any("gate errors: ok: 0.01 errors" in line for line in lines)
    assert any("1 of 10 tasks run the new image" in line for line in lines)
    assert len(lines) <= 15
    run = await world.until("done")
    verdicts = (await world.service.history("web", 1, run.number)).verdicts[run.number]
    drawn = ET.fromstring(gantt_svg(run, verdicts, [], world.now))
    texts = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"1 canary 1", "2 50 %", "3 all", "gate errors"} <= set(texts)
    assert status_lines(await world.service.view("web"))[0] == "pipeline web: idle"


def test_the_reference_matches_the_types():
    tool = runpy.run_path(str(Path(__file__).resolve().parents[3] / "tools/references"))
    page = tool["PIPELINE_PAGE"].read_text()
    assert tool["written_pipelines"]() == page, "run tools/references"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row for row in rows if row.endswith("|  |")] == []


def test_a_command_gate_has_time_to_pass_and_a_job_name():
    gate = {"command": {"run": ["/bin/smoke"], "timeout_s": 600}, "deadline_s": 300}
    stages = [{"kind": "all", "gates": ["a-rather-long-name-of-a-gate"]}]
    with pytest.raises(InvalidInput) as caught:
        a_pipeline(
            name="a-rather-long-name-of-a-pipeline",
            stages=stages,
            gates={"a-rather-long-name-of-a-gate": gate},
        )
    found = {e.field: e.reason for e in caught.value.errors}
    assert "it would never pass" in found["gates.a-rather-long-name-of-a-gate.deadline_s"]
    assert "56 are possible" in found["gates.a-rather-long-name-of-a-gate"]


@pytest.mark.behaviour("CV1")
@pytest.mark.parametrize(
    ("state", "result", "code", "outcome"),
    [
        (TaskState.STOPPED, "success", 0, GateOutcome.PASS),
        (TaskState.STOPPED, "exit-code", 3, GateOutcome.FAIL),
        (TaskState.FAILED, "timeout", None, GateOutcome.FAIL),
        (TaskState.STOPPED, "lost", None, GateOutcome.NO_DATA),
        (TaskState.RUNNING, "exit-code", 3, None),
    ],
)
def test_the_end_of_a_command_is_its_verdict(
    state: TaskState, result: str, code: int | None, outcome: GateOutcome | None
):
    """A machine that failed during the command gives no data about what was checked."""
    spec = JobSpec(name="c", entitlement="e", tasks=1, image=f"sha256:{1:064x}", command=["/c"])
    last = Exit(result=result, code=code, at=1.0)
    task = TaskRecord(index=0, version=1, generation=1, state=state, last_exit=last)
    record = JobRecord(name="c", spec=spec, version=1, specs={1: spec}, tasks=[task])
    found = outcome_of(record)
    assert (None if found is None else found.outcome) is outcome
