"""`[autoscale]` in a job file: errors are listed all at once, and stored jobs may lack it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from control_plane.api.autoscale import Autoscale, AutoscaleMode, starting_size
from control_plane.api.jobs import JobSpec
from control_plane.api.stored_jobs import JobIntent
from control_plane.api.validate import job_errors, job_spec
from control_plane.scheduler.core.job_check import same_tasks
from control_plane.store.records import decode
from tests.unit.control_plane.autoscaler.sizing_builders import a_policy

JOB: dict[str, Any] = {
    "name": "web",
    "entitlement": "front",
    "tasks": 6,
    "image": "sha256:" + "a" * 64,
    "command": ["/bin/serve"],
    "limits": {"cpu_max_cores": 2.0, "memory_max_bytes": 1 << 30},
}
GOOD: dict[str, Any] = {"minimum": 2, "maximum": 40, "target": 0.6, "mode": "apply"}


def errors(policy: dict[str, Any], **job: Any) -> list[str]:
    return [f"{e.field}: {e.reason}" for e in job_errors({**JOB, **job, "autoscale": policy})]


def test_a_good_policy_is_taken_with_its_defaults() -> None:
    spec = job_spec({**JOB, "autoscale": GOOD}, "web.toml")
    assert spec.autoscale == Autoscale(minimum=2, maximum=40, target=0.6, mode=AutoscaleMode.APPLY)


@pytest.mark.behaviour("AS9")
@pytest.mark.parametrize("key", ["overrides", "task_overrides", "task_ids", "task_indexes"])
def test_a_job_that_follows_its_load_has_tasks_that_are_alike(key: str) -> None:
    """Settings of single tasks are refused with a pointer to shards, because the autoscaler may
    remove any task."""
    found = job_errors({**JOB, "autoscale": GOOD, key: {"0": {}}})
    (reason,) = [error.reason for error in found if error.field == key]
    assert "tasks of a job are alike" in reason
    assert "twinectl job shards" in reason


@pytest.mark.behaviour("AS1")
def test_network_is_a_signal_of_private_networks_alone() -> None:
    """The signal is in bytes per second, as agents measure it."""
    policy = {**GOOD, "signal": "network", "target": 5e6}
    assert errors(policy) == [
        'autoscale.signal: network needs network.mode = "private": '
        "traffic of the host network is not counted per task"
    ]
    assert errors(policy, network={"mode": "private"}) == []


@pytest.mark.behaviour("BUG-CP115")
@pytest.mark.parametrize("key", ["minimum", "maximum", "target", "ceiling"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_with_hundreds_of_digits_is_one_error(key: str, sign: int) -> None:
    """No float holds such a number: the check failed, and the front end answered 500."""
    assert [line.partition(":")[0] for line in errors({**GOOD, key: sign * 10**400})] == [
        f"autoscale.{key}"
    ]


def test_every_mistake_in_a_policy_is_listed() -> None:
    found = errors(
        {
            "minimum": 50,
            "maximum": 40,
            "target": 1.6,
            "ceiling": 1.2,
            "query": "up",
            "quantile": 2,
            "schedule": [
                {"start": "09:00", "end": "09:00"},
                {"start": "9:00", "end": "10:00", "minimum": 5, "maximum": 3},
                {"start": "09:00", "end": "10:00", "minimum": 5, "dates": ["02-29", "2026-02-29"]},
            ],
        }
    )
    assert [line.partition(":")[0] for line in found] == [
        "autoscale.quantile",
        "autoscale.schedule[1].start",
        "autoscale.maximum",
        "autoscale.query",
        "autoscale.target",
        "autoscale.ceiling",
        "autoscale.ceiling",
        "autoscale.schedule[0]",
        "autoscale.schedule[0].end",
        "autoscale.schedule[1].maximum",
        "autoscale.schedule[2].dates",
    ]


def test_a_query_is_needed_where_it_is_the_signal() -> None:
    assert errors({**GOOD, "signal": "query", "target": 300}) == [
        "autoscale.query: missing; signal is query"
    ]
    assert errors({**GOOD, "signal": "query", "target": 300, "query": "sum(x)"}) == []


LATENCY: dict[str, Any] = {"query": "histogram_quantile(0.95, x)", "limit_s": 0.3}


@pytest.mark.behaviour("AS1")
@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, []),
        ({"target": 40}, []),
        ({"latency": None}, ["target: missing; it is optional only with autoscale.latency"]),
        ({"latency": {"query": "x"}}, ["latency.limit_s"]),
        ({"latency": {**LATENCY, "limit_s": 0}}, ["latency.limit_s"]),
        ({"latency": {**LATENCY, "share": 1.2}}, ["latency.share"]),
        ({"latency": {**LATENCY, "query": ""}}, ["latency.query"]),
        ({"latency": {**LATENCY, "percentile": 95}}, ["latency.percentile"]),
        ({"signal": "cpu", "query": ""}, ['latency: needs signal = "query", not cpu']),
        ({"target": 40, "ceiling": 50}, ["ceiling: cannot be combined with latency"]),
    ],
)
def test_a_latency_is_a_target_of_requests(changes: dict[str, Any], wrong: list[str]) -> None:
    """The load of a task may be omitted only if the autoscaler learns it from latency."""
    policy = {"minimum": 2, "maximum": 40, "signal": "query", "query": "sum(x)", "latency": LATENCY}
    found = errors({**policy, **changes})
    assert len(found) == len(wrong)
    assert all(line.startswith(f"autoscale.{w}") for line, w in zip(found, wrong, strict=True))


@pytest.mark.parametrize(("signal", "needs"), [("cpu", "cpu_max"), ("memory", "memory_max_bytes")])
def test_a_share_needs_the_limit_that_it_is_a_share_of(signal: str, needs: str) -> None:
    [error] = errors({**GOOD, "signal": signal}, limits={})
    assert error.startswith("autoscale.signal")
    assert needs in error


def test_any_value_in_any_place_is_an_error_and_not_an_exception() -> None:
    odd = [None, True, "x", 1, -1.5, [], [1], {}, {"start": 1}]
    for value in odd:
        assert job_errors({**JOB, "autoscale": value}) or value is None
        for key in ("minimum", "maximum", "target", "schedule", "query", "signal", "up"):
            assert errors({**GOOD, key: value}) or value is not None
        assert errors({**GOOD, "latency": value}) or value is None


def test_a_policy_makes_no_new_version() -> None:
    spec = msgspec.convert(JOB, JobSpec)
    assert same_tasks(spec, msgspec.structs.replace(spec, autoscale=a_policy(), tasks=9))


@pytest.mark.parametrize(
    ("written", "known", "size"), [(6, None, 6), (1, None, 2), (6, 30, 30), (6, 300, 100)]
)
def test_the_file_sets_the_first_size_and_the_autoscaler_the_others(
    written: int, known: int | None, size: int
) -> None:
    assert starting_size(a_policy(), written, known) == size
    recommends = a_policy(mode=AutoscaleMode.RECOMMEND)
    assert starting_size(recommends, written, known) == written
    assert starting_size(None, written, known) == written


def test_a_job_stored_by_a_release_without_policies_is_read() -> None:
    spec = msgspec.to_builtins(msgspec.convert(JOB, JobSpec))
    del spec["autoscale"]
    stored = {"schema": 2, "name": "web", "spec": spec, "version": 1, "specs": {"1": spec}}
    found = decode(msgspec.json.encode(stored), JobIntent, "jobs/web")
    assert found.spec.autoscale is None
