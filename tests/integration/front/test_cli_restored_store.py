"""`twinectl restored` with a front end: what users see, and which commands they may give."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from agent.api import Health, Location, ProfileStatus, TaskState, TaskStatus
from agent.api.joining import JoinRequest
from control_plane.api.restored import Restored
from control_plane.cli import main
from control_plane.store import Put
from control_plane.store.records import RESTORED, encode

from .conftest import FACTS, Region

pytestmark = pytest.mark.behaviour("F-88")

UNKNOWN_TASK = TaskStatus(
    task_id="c-0",
    generation=3,
    epoch=7,
    state=TaskState.RUNNING,
    health=Health.HEALTHY,
    image="sha256:" + "1" * 64,
    job="c",
    entitlement="front",
    started_at=1.0,
)


def ctl(region: Region, *arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"TWINE_ENDPOINT": f"unix:{region.socket}"})


async def _put_back(region: Region) -> None:
    """Act as a control plane whose store was restored, with reports from one of two hosts."""
    plane = region.control_plane
    note = Restored(at=2.0, copied_at=1.0, epoch=9)
    await plane.store.txn({}, [Put(RESTORED, encode(note))])
    await plane.restored.load()
    for name in ("vm1", "vm2"):
        request = JoinRequest(
            token="", machine=name, csr_pem="", address="a:1", location=Location(), facts=FACTS
        )
        await plane.brokers.join(request)
    plane.observations.listed("vm1", FACTS, [UNKNOWN_TASK], ProfileStatus(), [])


def test_a_store_that_was_never_restored_waits_for_no_approval(region: Region) -> None:
    assert ctl(region, "restored", "show").output == "the store was never restored from a copy\n"
    assert ctl(region, "restored", "release", "--yes").exit_code == 5
    gone = ctl(region, "restored", "stop", "c-0", "--machine", "vm1")
    assert gone.exit_code == 3
    assert "twinectl restored show" in gone.output


@pytest.mark.behaviour("F-88")
def test_objects_unknown_to_a_restored_copy_are_shown_and_released(region: Region) -> None:
    """The release needs a confirmation, is recorded, and succeeds once."""
    region.run(_put_back(region))
    shown = ctl(region, "restored", "show").output
    assert "vm1      c-0   unknown-job  c    front        running" in shown
    assert "no report yet: 1 machines: vm2" in shown
    assert "the control plane sends no commands before: twinectl restored release" in shown
    begun: list[bool] = []
    region.control_plane.restored.begin = lambda: begun.append(True)
    refused = CliRunner().invoke(
        main, ["restored", "release"], "n\n", env={"TWINE_ENDPOINT": f"unix:{region.socket}"}
    )
    assert refused.exit_code != 0
    assert begun == []
    assert ctl(region, "restored", "release", "--yes").exit_code == 0
    assert begun == [True]
    assert ctl(region, "restored", "release", "--yes").exit_code == 5
    view = json.loads(ctl(region, "restored", "show", "--output", "json").output)
    assert view["restored"]["released_by"] == "local:0"
    assert "sends no commands" not in ctl(region, "restored", "show").output
    assert ctl(region, "restored", "let-go", "c-0", "--machine", "vm2").exit_code == 3
    released = ctl(region, "restored", "let-go", "c-0", "--machine", "vm1")
    assert released.output == "task c-0 on vm1 is released\n"
    assert region.control_plane.observations.released_tasks == {"vm1": {"c-0"}}
    audit = ctl(region, "audit").output
    assert "release_restored" in audit
    assert "let_task_go" in audit
