"""This release reads records that earlier releases wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from builders import FakeHost, running

from agent.api import Health, TaskState
from agent.runtime.core.records import key_of
from agent.runtime.journal import Journal

RELEASES = sorted(
    p for p in (Path(__file__).parents[3] / "data" / "journal").iterdir() if p.is_dir()
)


@pytest.fixture(params=RELEASES, ids=lambda p: p.name)
def release(request: pytest.FixtureRequest) -> Path:
    """Yield the folder of each release's records."""
    folder: Path = request.param
    return folder


@pytest.mark.behaviour("F-05")
def test_every_record_of_an_earlier_release_is_read_whole(release: Path, tmp_path: Path) -> None:
    """No field is lost, and no unit is matched with another specification."""
    shutil.copytree(release, tmp_path / "journal")
    found = Journal(tmp_path / "journal").replay()

    assert found.unreadable == {}
    assert set(found.tasks) == {"web-0", "job"}
    assert (found.tombstones["gone"].generation, found.tombstones["gone"].epoch) == (4, 2)
    web = found.tasks["web-0"]
    assert (web.state, web.health, web.restarts, web.streak) == (
        TaskState.RUNNING,
        Health.HEALTHY,
        2,
        1,
    )
    assert (web.spec.generation, web.spec.environment) == (7, {"MODE": "a=b"})
    assert web.last_exit is not None
    assert web.last_exit.code == 3
    assert web.spec.probe is not None
    assert web.spec.probe.path == "/healthz"
    keys = json.loads((release / "keys").read_text())
    assert {t: key_of(r.spec) for t, r in found.tasks.items()} == keys


@pytest.mark.behaviour("F-05")
async def test_tasks_of_an_earlier_release_run_on_under_this_one(
    release: Path, host: FakeHost
) -> None:
    """An upgrade of the agent restarts nothing."""
    shutil.copytree(release, host.state / "journal", dirs_exist_ok=True)
    (host.state / "journal" / "keys").unlink()
    key = json.loads((release / "keys").read_text())["web-0"]
    image, root = host.state / "images" / ("1" * 64), host.state / "tasks" / "web-0"
    root.parent.mkdir(parents=True, exist_ok=True)
    host.fake.btrfs.snapshot(image, root)
    name = "twine-task-web-0.service"
    host.fake.systemd.start_transient(
        name, {"ExecStart": [["/bin/server"]], "Description": f"Twine task web-0 [key {key}]"}
    )
    before = host.invocation("web-0")
    async with host.agent() as client:
        status = await running(client, "web-0")

    assert (status.invocation_id, status.generation) == (before, 7)
    assert host.fake.systemd.started.count(name) == 1
