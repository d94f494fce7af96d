"""Prepares the machines that tasks move to: profile verified, image there, signature trusted.

A machine gets the image first, so that no old task is stopped for a new one that cannot start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence

from control_plane.agents.dispatcher import Dispatcher
from control_plane.agents.region import Region
from control_plane.allocator.core.spread import Repair, Target
from control_plane.api.jobs import JobSpec
from control_plane.scheduler.core.decision import Decision, FoundPlaces
from control_plane.scheduler.placement import Placements
from control_plane.scheduler.preparation import PreparedMachines


class Destinations:
    """Finds a machine for each task that is updated or moved, and has it prepared."""

    def __init__(
        self,
        region: Region,
        placements: Placements,
        dispatcher: Dispatcher,
        spawn: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        """`spawn` runs a coroutine concurrently with the rounds."""
        self._observations = region.observations
        self._placements, self._dispatcher, self._spawn = placements, dispatcher, spawn
        self.prepared_machines = PreparedMachines(region, placements.allocator)
        self._awaited: dict[str, set[str]] = defaultdict(set)

    def take_awaiting(self, machine: str) -> set[str]:
        """Return the jobs that wait until a machine has their image or profile; forget them."""
        return self._awaited.pop(machine, set())

    async def find(self, decision: Decision, repairs: Sequence[Repair]) -> FoundPlaces:
        """Return which of the chosen tasks have a machine that is ready, with their image on it."""
        record, ready, detail, without_room = decision.record, set[int](), "", set[int]()
        known = {repair.task: repair.target for repair in repairs}
        wanted = decision.specs_after_stop()
        asked = {index: spec for index, spec in wanted.items() if index not in known}
        targets = await self._placements.targets(record, asked, decision.moving)
        for index in decision.chosen:
            target = known.get(index) or targets.of.get(index)
            if target is None:
                without_room.add(index)
                detail = f"the update waits for room: {'; '.join(targets.reasons)}"
            elif not (
                decision.may_go_unproved(index, known) or self.prepared_machines.is_proved(target)
            ):
                detail = detail or f"the move to {target.machine} waits for its host profile"
                self._prepare(decision, target)
            elif (why := await self._lacks(decision, wanted[index], target)) is None:
                ready.add(index)
            else:
                detail = why or detail
        return FoundPlaces(frozenset(ready), frozenset(without_room), detail)

    def _prepare(self, decision: Decision, target: Target) -> None:
        """Take a free machine for the job's pool, so that it verifies the pool's profile."""
        self._awaited[target.machine].add(decision.record.name)
        if target.is_taken:
            pool = self._placements.pool_of(decision.record)
            self._spawn(self.prepared_machines.take(target.machine, pool))

    async def _lacks(self, decision: Decision, spec: JobSpec, target: Target) -> str | None:
        """Return why a task cannot start on a machine; None: it can, empty: its image is pulled."""
        observation = self._observations.observation(target.machine)
        image, keys = spec.image, self._placements.image_keys(spec)
        if why := await self._dispatcher.distrust(image, keys):
            return f"the update waits: {why}"
        if target.is_taken or image in observation.images:
            return None
        self._awaited[target.machine].add(decision.record.name)
        self._dispatcher.prestage(target.machine, image, keys)
        refused = observation.refused.get(image)
        return f"the update waits for its image: {refused}" if refused else ""
