"""A task that must not outlive its contact, in an agent on a machine in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from builders import FakeHost, a_spec, running
from msgspec.structs import replace

from agent import fence
from agent.api import Disconnect, DisconnectPolicy

STOP = Disconnect(policy=DisconnectPolicy.STOP, after_s=3600.0)


@pytest.mark.behaviour("BUG-AG86")
async def test_a_task_that_is_put_again_during_its_removal_is_watched_by_the_fence(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the removal took the file of the new task, which then never started."""
    spec = a_spec(epoch=1, disconnect=STOP)
    async with host.serving() as (services, client), asyncio.timeout(60):
        contact, tasks = services.contact, services.tasks
        contact.record_contact(contact.answer(), 1)
        fence.check(Path(host.config.run_dir) / "fence", contact.now_s(), lambda _: False)
        await tasks.put("web", spec)
        await running(client, "web")

        almost, go_on = asyncio.Event(), asyncio.Event()
        ended = tasks._capacity.memory.ended

        async def slowly(task_id: str) -> None:
            if task_id not in tasks.records():
                almost.set()
                await go_on.wait()
            await ended(task_id)

        monkeypatch.setattr(tasks._capacity.memory, "ended", slowly)
        await tasks.delete("web", 1, 1)
        await almost.wait()
        await tasks.put("web", replace(spec, generation=2))
        go_on.set()
        await running(client, "web")
        assert (Path(host.config.run_dir) / "fence" / "web").exists()
