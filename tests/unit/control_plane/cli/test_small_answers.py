"""Output of commands for empty answers, and which of their options are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from control_plane.api.capacity import (
    EntitlementRecord,
    Entitlements,
    EntitlementSpec,
    EntitlementView,
)
from control_plane.api.intent_changes import JobIntents, PushChange
from control_plane.api.ownership import ShardLoad, ShardLoads
from control_plane.api.people import AuditPage
from control_plane.api.rebalancing import RebalanceHistory
from control_plane.api.routes import ROUTES
from control_plane.cli import main, pipeline
from control_plane.cli.program import Target
from control_plane.front_end.recorder import _object
from conveyor.api import StartRequest
from conveyor.runs import PipelineView, RunHistory
from wire.routes import Route

DIGEST = "sha256:" + "a" * 64


@pytest.mark.behaviour("BUG-UX113")
def test_a_pipeline_without_runs_has_a_history_that_states_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Formerly `pipeline history` of a pipeline without runs printed nothing."""
    monkeypatch.setattr(pipeline, "_ask", lambda *_: RunHistory(runs=[]))
    found = CliRunner().invoke(main, ["pipeline", "history", "web"])
    assert (found.exit_code, found.stdout) == (0, "pipeline web has no run yet\n")


@pytest.mark.behaviour("BUG-UX136")
def test_a_history_without_moves_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formerly `rebalance history` printed nothing before the first move."""
    monkeypatch.setattr(Target, "ask", lambda *_: RebalanceHistory(moves=[]))
    found = CliRunner().invoke(main, ["rebalance", "history"])
    assert (found.exit_code, found.stdout) == (0, "no move or exchange has ended yet\n")


@pytest.mark.behaviour("BUG-UX118")
@pytest.mark.parametrize(
    ("options", "sent"),
    [
        (["--image", "web:v1"], DIGEST),
        (["--image", DIGEST], DIGEST),
        (["--release", "0.2.0"], "0.2.0"),
    ],
)
def test_a_run_starts_with_an_image_by_name_or_digest_or_with_a_release(
    options: list[str], sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly `pipeline start` accepted no image names."""
    requests: list[str] = []

    class Service:
        def start_run(self, name: str, request: StartRequest) -> PipelineView:
            requests.append(request.image)
            return SimpleNamespace(name=name)

    known = SimpleNamespace(images=[SimpleNamespace(digest=DIGEST, names=["web:v1"])])
    monkeypatch.setattr(Target, "ask", lambda *_: known)
    monkeypatch.setattr(pipeline, "_ask", lambda _, call: call(Service()))
    monkeypatch.setattr(pipeline, "_show", lambda *_: None)
    found = CliRunner().invoke(main, ["pipeline", "start", "web", *options])
    assert (found.exit_code, requests) == (0, [sent]), found.output


@pytest.mark.behaviour("BUG-UX118")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image", "web:v9"], "the image store has no image with the name 'web:v9'"),
        (["--image", "sha256:ab"], "--image 'sha256:ab' is not valid"),
        (["--release", "a b"], "--release 'a b' is not valid"),
        ([], "name either --image or --release"),
        (["--image", "web:v1", "--release", "0.2.0"], "name either --image or --release"),
    ],
)
def test_a_run_is_refused_without_one_valid_image_or_release(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "ask", lambda *_: SimpleNamespace(images=[]))
    found = CliRunner().invoke(main, ["pipeline", "start", "web", *options])
    assert found.exit_code == 64
    assert message in found.output


@pytest.mark.behaviour("BUG-UX114")
@pytest.mark.parametrize("name", ["foo/x", "jobs/web", "job/", "foo:drain"])
def test_an_audit_filter_for_an_unknown_kind_of_object_is_refused_with_the_kinds(name: str) -> None:
    """Formerly `audit --object foo/x` printed an empty table."""
    found = CliRunner().invoke(main, ["audit", "--object", name])
    assert found.exit_code == 64
    assert f"--object takes KIND/NAME such as job/web, not {name!r}" in found.output
    assert "kinds: entitlement, entitlement-request, group, host-admin, image, job" in found.output


@pytest.mark.behaviour("BUG-UX114")
@pytest.mark.parametrize("route", [route for route in ROUTES if route.is_change])
def test_each_object_of_the_audit_log_can_be_queried(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "ask", lambda *_: AuditPage(entries=[]))
    name = _object(route, dict.fromkeys(route.parameters, "x"), None)
    found = CliRunner().invoke(main, ["audit", "--object", name])
    assert found.exit_code == 0, found.output


@pytest.mark.behaviour("BUG-UX142")
def test_the_list_of_entitlements_names_few_of_many_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entitlement with 200 jobs had a line of two kilobytes."""
    record = EntitlementRecord(name="front", spec=EntitlementSpec(machines=9))
    view = EntitlementView(record=record, jobs=[f"job{n:03}" for n in range(200)])
    monkeypatch.setattr(Target, "ask", lambda *_: Entitlements(entitlements=[view]))
    shown = CliRunner().invoke(main, ["entitlement", "list"]).stdout
    assert shown.endswith("  job000, job001, job002, job003, job004, and 195 more\n")
    monkeypatch.setattr(Target, "ask", lambda *_: view)
    shown = CliRunner().invoke(main, ["entitlement", "show", "front"]).stdout
    assert "200: job000, job001" in shown
    assert "job049, and 150 more\n" in shown


@pytest.mark.behaviour("BUG-UX169")
def test_a_region_with_all_shards_gets_no_further_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formerly `shard add` ended with a traceback."""
    loads = ShardLoads(shards=[ShardLoad(shard=number) for number in range(64)], term=1)

    class Region:
        async def list_shards(self) -> ShardLoads:
            return loads

    monkeypatch.setattr(Target, "ask", lambda _, work: asyncio.run(work(Region())))
    found = CliRunner().invoke(main, ["shard", "add"])
    assert (found.exit_code, "the region has all 64" in found.output) == (5, True)


@pytest.mark.behaviour("BUG-UX170")
def test_a_configuration_is_sent_with_the_line_ends_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly `job push --config` sent Unix line ends in place of others."""
    file = tmp_path / "app.ini"
    file.write_bytes("name = é\r\n".encode())
    sent: list[PushChange] = []

    class Region:
        async def put_intent(self, name: str, dimension: str, change: PushChange) -> JobIntents:
            sent.append(change)
            return JobIntents(job=name, intents=[], size=1, versions=[])

    monkeypatch.setattr(Target, "ask", lambda _, work: asyncio.run(work(Region())))
    found = CliRunner().invoke(main, ["job", "push", "web", "--config", f"app.ini={file}"])
    assert found.exit_code == 0, found.output
    assert sent[0].configuration == {"app.ini": "name = é\r\n"}


@pytest.mark.behaviour("BUG-UX171")
def test_a_request_to_remove_an_entitlement_has_no_other_options() -> None:
    """Formerly `entitlement request --delete --machines 5` ignored the number."""
    command = ["entitlement", "request", "ads", "--delete", "--reason", "r", "--machines", "5"]
    found = CliRunner().invoke(main, ["--endpoint", "unix:/nowhere", *command])
    message = "--delete cannot be given with --machines: it is removed"
    assert (found.exit_code, message in found.output) == (64, True)
