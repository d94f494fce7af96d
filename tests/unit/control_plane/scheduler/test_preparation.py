"""Machines that are taken in advance for tasks that will move there."""

from __future__ import annotations

import pytest
from fake_agents import Region as Machines
from virtual_time import RUNTIME, run

from control_plane.agents.observations import Observations
from control_plane.agents.region import Region
from control_plane.api.settings import SchedulerSettings
from control_plane.broker.brokers import Brokers
from control_plane.scheduler.preparation import PreparedMachines
from control_plane.store.memory import MemoryStore


class BrokenPlaces:
    async def take(self, machine: str, pool: str) -> bool:
        raise RuntimeError("a fault of the program")


@pytest.mark.behaviour("BUG-CP145")
def test_an_unexpected_error_keeps_no_machine_and_does_not_end_the_rounds():
    """It runs in the task group of the scheduler, which an exception would end."""

    async def main() -> None:
        async with MemoryStore() as store:
            brokers = Brokers(store, RUNTIME)
            await brokers.load()
            await brokers.join(Machines().add("m1", "dc1", "msb1").join())
            observations = Observations(brokers, RUNTIME)
            region = Region(brokers, observations, SchedulerSettings(), RUNTIME)
            prepared = PreparedMachines(region, BrokenPlaces())
            await prepared.take("m1", "front")
            assert not prepared.keeps("m1")

    run(main())
