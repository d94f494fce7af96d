"""The machines of plans as they are now, from their records and their agents' reports."""

from __future__ import annotations

from collections.abc import Iterable

from agent.api import ProfileState
from control_plane.agents.region import Region
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.api.maintenance import Ends, PlanRecord, WaveRecord, WaveState, Work
from control_plane.broker.core.unavailability import of_plan
from control_plane.ops_planner.core.waves import SeenHost
from control_plane.scheduler.ports import Directory


class HostsOfPlans:
    """Reads the machines that a plan waits for; changes nothing."""

    def __init__(self, region: Region, directory: Directory) -> None:
        self._machines, self._observations = region.broker.table, region.observations
        self._follows, self._runtime, self._directory = region.follows, region.runtime, directory

    def of(self, plan: PlanRecord, waves: Iterable[WaveRecord]) -> dict[str, SeenHost]:
        """Return the machines of announced waves, and of others that a plan has not done with.

        These are waves with machines that were left out, and with `power-cap` all finished ones.
        """
        seen = dict[str, SeenHost]()
        if plan.ended is not None:
            return seen
        for wave in waves:
            is_counted = plan.request.work is Work.POWER_CAP and wave.state is WaveState.DONE
            if wave.state is WaveState.ANNOUNCED or wave.left_out or is_counted:
                for name in wave.machines:
                    record = self._machines.find(name)
                    if record is not None:
                        seen[name] = self._seen(plan, record)
        return seen

    def _seen(self, plan: PlanRecord, record: MachineRecord) -> SeenHost:
        event = of_plan(record, plan.name, plan.at)
        observation = self._observations.observation(record.machine)
        elsewhere = not self._follows(record.entitlement)  # then only its record shows its state
        is_up = record.state is MachineState.UP and (observation.answering or elsewhere)
        may_stay = plan.request.tasks_survive and event is not None and event.deadline is not None
        may_stay = may_stay and self._runtime.date() >= (event.deadline or 0.0 if event else 0.0)
        return SeenHost(
            is_open=event is None or event.end is None,
            is_well=is_up and (not record.entitlement or self._is_ready(record)),
            tasks=0 if may_stay else self._left(plan, record, is_reachable=is_up),
            boot=record.facts.boot_id if record.facts is not None else "",
            power_w=record.hardware.power_w if record.hardware is not None else 0,
            is_held=bool(record.entitlement) and plan.request.work is not Work.POWER_CAP,
        )

    def _is_ready(self, record: MachineRecord) -> bool:
        if self._follows(record.entitlement):
            return self._observations.ready(record)
        return record.profile_state is ProfileState.VERIFIED

    def _left(self, plan: PlanRecord, record: MachineRecord, *, is_reachable: bool) -> int:
        """Return how many tasks must still leave a machine.

        A task that its controller had stopped, to be started there again afterwards, counts as
        gone: its place is kept, and it does not run (TC8). An empty machine keeps no place if it
        does not return. A machine that does not answer may still run its tasks.
        """
        tasks = self._directory.tasks(record.machine)
        if not is_reachable or plan.ends is Ends.EMPTY or not self._follows(record.entitlement):
            return len(tasks)
        running = self._observations.observation(record.machine).tasks
        return sum(1 for task in tasks if task in running)
