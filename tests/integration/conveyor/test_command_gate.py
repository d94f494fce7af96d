"""A gate that runs a command as a task, against the production control plane."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.api import Limits
from agent.machine.fake_systemd import Ended
from control_plane.api.intent_changes import HoldChange, IntentChange, SizeChange
from control_plane.api.intents import Dimension
from control_plane.api.jobs import JobSpec, UpdatePolicy
from conveyor.client import ConveyorClient
from conveyor.config import ConveyorConfig
from tests.integration.conveyor.test_delivery import _new, conveyor, ctl, pushed, until
from vm_lab.fleet import fleet

pytestmark = pytest.mark.behaviour("CV1")

FILE = """
name = "web"
jobs = ["web"]

[[stages]]
kind = "canary"
tasks = 1
gates = ["smoke"]

[[stages]]
kind = "all"

[gates.smoke]
every_s = 1
command = { run = ["/bin/smoke"], timeout_s = 60 }
"""


@pytest.mark.behaviour("CV1", "FE11", "JC15")
async def test_a_gate_command_runs_as_a_task_while_others_write(tmp_path: Path):
    """Other writers change the size and set a hold meanwhile; both compose with the push."""
    async with fleet(4) as region:
        client = region.client
        await region.entitle()
        one, two, three = [await pushed(client, v) for v in (1, 2, 3)]
        checked: list[str] = []

        def smoke(_: list[str], properties: Mapping[str, Any]) -> Ended:
            found = dict(line.split("=", 1) for line in properties["Environment"])
            checked.append(found["PIPELINE_NEW_TASKS"])
            return Ended(1 if found["PIPELINE_IMAGE"] == three else 0)

        for host in region.hosts:
            host.machine.systemd.programs["smoke"] = smoke
        spec = JobSpec(
            name="web",
            entitlement="front",
            tasks=4,
            image=one,
            command=["/bin/serve"],
            limits=Limits(memory_max_bytes=64 << 20),
            update=UpdatePolicy(max_unavailable=2, drain_s=0),
        )
        await client.apply_job(spec)
        await until(lambda: client.get_job("web"), lambda s: s.phase == "stable")
        config = ConveyorConfig(
            state=str(tmp_path / "state"),
            socket=str(tmp_path / "conveyor.sock"),
            endpoint=region.endpoint,
        )
        service = f"unix:{config.socket}"
        async with conveyor(config), ConveyorClient(service) as delivery:
            file = tmp_path / "web.toml"
            file.write_text(FILE)
            await ctl(service, region.endpoint, "apply", str(file))
            hold = HoldChange(lasts_s=3600, reason="the cup final")
            await client.put_intent("web", Dimension.HOLD, hold)
            await ctl(service, region.endpoint, "start", "web", "--image", two)
            await until(
                lambda: delivery.get_pipeline("web"),
                lambda v: v.record.waiting is not None and "cup final" in v.record.waiting.waits,
            )
            assert _new(await client.get_job("web"), two) == 0
            await client.put_intent("web", Dimension.SIZE, SizeChange(tasks=6))
            await client.withdraw_intent("web", Dimension.HOLD, IntentChange())
            view = await until(lambda: delivery.get_pipeline("web"), lambda v: v.last is not None)
            assert (view.last.state, view.last.reason) == ("done", "")
            assert _new(await client.get_job("web"), two) == 6
            verdicts = (await delivery.history("web", run=1)).verdicts[1]
            assert [v.reason for v in verdicts][-1] == "the command ended: exit code 0"
            assert checked[0].startswith("web-")

            await ctl(service, region.endpoint, "start", "web", "--image", three)
            view = await until(
                lambda: delivery.get_pipeline("web"),
                lambda v: v.last is not None and v.last.number == 2,
            )
            assert view.last.state == "rolled-back"
            assert view.last.reason == "gate smoke: the command ended: exit code 1"
            status = await client.get_job("web")
            assert (_new(status, two), status.record.intents["push"].is_owned) == (6, False)
            await until(
                client.list_jobs, lambda found: [j.record.name for j in found.jobs] == ["web"]
            )
