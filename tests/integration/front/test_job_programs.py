"""Programs create, change and delete many jobs at once through the API of a real process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.intent_changes import PushChange, SizeChange
from control_plane.api.intents import Dimension
from control_plane.api.jobs import JobSpec
from control_plane.client import ControlPlaneClient
from tests.integration.attack.target_process import Target, running
from tests.integration.conveyor.test_delivery import pushed
from wire.errors import NotFound

pytestmark = pytest.mark.behaviour("FE8")

JOBS, AT_ONCE = 30, 16
"""Number of jobs that one caller may delete at once without an operator (`twinectl limit lift`)."""


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with running("control plane", tmp_path) as found:
        yield found


async def test_a_program_creates_sizes_pushes_and_deletes_many_jobs_at_once(
    target: Target,
) -> None:
    """Each call is acknowledged, each intent has its last written value, and nothing is left."""
    names, turn = [f"train-{n}" for n in range(JOBS)], asyncio.Semaphore(AT_ONCE)
    async with ControlPlaneClient(f"unix:{target.socket}") as client:
        await client.put_entitlement("front", EntitlementSpec(machines=1))
        one, two = [await pushed(client, version) for version in (1, 2)]

        async def create(name: str) -> None:
            async with turn:
                job = JobSpec(name=name, entitlement="front", image=one, command=["/x"], tasks=0)
                await client.apply_job(job)

        async def push(name: str) -> None:
            async with turn:
                await client.put_intent(name, Dimension.PUSH, PushChange(image=two))

        async def delete(name: str) -> None:
            async with turn:
                await client.stop_job(name)

        await asyncio.gather(*map(create, names))
        written = await client.put_sizes(
            {name: SizeChange(tasks=n) for n, name in enumerate(names)}
        )
        assert (len(written.versions), written.refused) == (JOBS, {})
        await asyncio.gather(*map(push, names))
        for n, name in enumerate(names):
            record = (await client.get_job(name)).record
            assert (record.spec.tasks, record.spec.image) == (n, two)
            assert record.intents["push"].value == {"version": 2, "share": 1.0}
        await asyncio.gather(*map(delete, names))
        async with asyncio.timeout(60):
            while (await client.list_job_briefs()).jobs:
                await asyncio.sleep(0.1)
        with pytest.raises(NotFound):
            await client.get_job(names[0])
