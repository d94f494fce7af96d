"""No task starts while a copy of it runs elsewhere that a restored store does not know."""

from __future__ import annotations

import pytest
from inventory import some_facts

from agent.api import Health, Location, ProfileStatus, TaskState, TaskStatus
from agent.api.joining import JoinRequest
from control_plane.agents.observations import Observations
from control_plane.agents.region import Region
from control_plane.allocator.task_directory import TaskDirectory
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskPhase, TaskRecord
from control_plane.api.settings import SchedulerSettings
from control_plane.broker.brokers import Brokers
from control_plane.runtime.runtime import Runtime
from control_plane.scheduler.unknown_copies import UnknownCopies
from control_plane.store.memory import MemoryStore

pytestmark = pytest.mark.behaviour("F-88")

IMAGE = "sha256:" + "1" * 64
FACTS = some_facts("m")
STATUS = TaskStatus(
    task_id="e-0",
    generation=3,
    epoch=7,
    state=TaskState.RUNNING,
    health=Health.HEALTHY,
    image=IMAGE,
    job="e",
)


def a_job(machine: str) -> JobRecord:
    spec = JobSpec(name="e", entitlement="front", tasks=1, image=IMAGE, command=["/x"])
    task = TaskRecord(
        index=0,
        version=1,
        generation=9,
        phase=TaskPhase.STARTING,
        placement=Placement(machine=machine),
    )
    return JobRecord(name="e", spec=spec, version=1, specs={1: spec}, tasks=[task])


@pytest.mark.behaviour("F-88")
@pytest.mark.parametrize("begins_late", [False, True])
async def test_it_waits_until_the_copy_is_gone_known_or_its_machine_is(begins_late: bool) -> None:
    """Reports that arrived before the store was released count too."""
    async with MemoryStore() as store:
        brokers = Brokers(store, Runtime())
        await brokers.load()
        for name in ("m1", "m2"):
            await brokers.join(
                JoinRequest(
                    token="",
                    machine=name,
                    csr_pem="",
                    address="a:1",
                    location=Location(),
                    facts=FACTS,
                )
            )
        observations = Observations(brokers, Runtime())
        observations.restored = 9
        directory = TaskDirectory()
        copies = UnknownCopies(
            Region(brokers, observations, SchedulerSettings(), Runtime()), directory
        )
        gone: list[str] = []
        copies.gone = gone.append
        if not begins_late:
            copies.begin()
        observations.listed("m2", FACTS, [STATUS], ProfileStatus(), [])
        if begins_late:
            copies.begin()
        assert copies.elsewhere("e-0", "m1") == "m2"
        assert copies.elsewhere("e-0", "m2") == "", "there it continues unchanged"
        assert copies.elsewhere("e-1", "m1") == ""
        assert "restored stop e-0 --machine m2" in copies.waiting(a_job("m1"))
        assert copies.waiting(a_job("m2")) == ""
        directory.settle("e", None, a_job("m2"))
        assert copies.elsewhere("e-0", "m1") == "", "a record has it there now"
        directory.settle("e", a_job("m2"), None)
        assert gone == []
        observations.listed("m2", FACTS, [], ProfileStatus(), [])
        assert copies.elsewhere("e-0", "m1") == ""
        assert gone == ["e-0"]
