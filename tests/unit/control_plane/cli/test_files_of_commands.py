"""Files read by commands other than `job apply`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from control_plane.api.sizings import ReplayCost, Simulation
from control_plane.cli import autoscale, show, work
from control_plane.cli.shards import shards
from wire.errors import InvalidInput

DIGEST = "sha256:" + "a" * 64
JOB = {"name": "index", "entitlement": "batch", "tasks": 1, "image": "web:v1", "command": ["/x"]}


@pytest.mark.behaviour("BUG-UX92")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": [0], "a": [1]}', "'a' is written twice"),
        ('{"a": [0]}, "expect": 1', "Extra data"),
        ("", "line 1 column 1"),
    ],
)
def test_a_shard_map_with_a_key_twice_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    """Formerly the last of two equal keys won, and errors gave places of another text."""
    file = tmp_path / "map.json"
    file.write_text(content)
    requests: list[Any] = []
    found = CliRunner().invoke(
        shards, ["web", "--set", str(file)], obj=SimpleNamespace(ask=requests.append)
    )
    assert isinstance(found.exception, InvalidInput)
    assert message in str(found.exception)
    assert requests == []


@pytest.mark.behaviour("BUG-UX93")
def test_work_is_submitted_with_the_digest_of_its_image_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly `work submit` refused a job file with an image name."""
    file = tmp_path / "index.json"
    file.write_text(json.dumps(JOB))
    wanted: list[Any] = []
    made = SimpleNamespace(name="index", state="waiting")

    def call(_: object, request: object, *, work: str) -> object:
        wanted.append((work, request))
        return made

    client = SimpleNamespace(call=call)
    monkeypatch.setattr(work, "ask_service", lambda _, requests: requests(client))
    known = SimpleNamespace(images=[SimpleNamespace(digest=DIGEST, names=["web:v1"])])
    found = CliRunner().invoke(
        work.work_submit, [str(file)], obj=SimpleNamespace(ask=lambda _: known)
    )
    assert found.exception is None, found.output
    assert [(name, request.job.image) for name, request in wanted] == [("index", DIGEST)]


@pytest.mark.behaviour("BUG-UX93")
def test_a_policy_is_replayed_without_asking_for_its_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly the example of docs/autoscaling.md, whose image is a name, was refused."""
    file = tmp_path / "web.json"
    policy = {"minimum": 1, "maximum": 4, "target": 0.6}
    limits = {"cpu_max_cores": 1.0}
    file.write_text(json.dumps({**JOB, "limits": limits, "autoscale": policy}))
    requests: list[str] = []
    monkeypatch.setattr(autoscale, "_ask", lambda socket, _: requests.append(socket))
    monkeypatch.setattr(show, "emit", lambda *_: None)
    found = CliRunner().invoke(autoscale.simulate, [str(file), "--socket", "/s"])
    assert found.exception is None, found.output
    assert requests == ["/s"]


@pytest.mark.behaviour("BUG-UX97")
def test_a_replay_without_history_prints_a_message_instead_of_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly each policy had a mean of 0.0 tasks, as if that were a measurement."""
    file = tmp_path / "web.json"
    policy = {"minimum": 1, "maximum": 4, "target": 0.6}
    file.write_text(json.dumps({**JOB, "limits": {"cpu_max_cores": 1.0}, "autoscale": policy}))
    none = ReplayCost()
    made = Simulation(job="web", days=0.0, start_s=10.0, own=none, other=none, fixed=none)
    monkeypatch.setattr(autoscale, "_ask", lambda *_: made)
    found = CliRunner().invoke(autoscale.simulate, [str(file)])
    assert found.output == "job web has no history to replay yet\n"
