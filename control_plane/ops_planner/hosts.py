"""Observes the machines of plans: their records and their agents' reports."""

from __future__ import annotations

from collections.abc import Iterable

from agent.api import ProfileState
from control_plane.agents.region import Region
from control_plane.api.machines import MachineRecord, MachineState
from control_plane.api.maintenance import Ends, PlanRecord, WaveRecord, WaveState, Work
from control_plane.broker.core.unavailability import of_plan
from control_plane.ops_planner.core.waves import ObservedMachine
from control_plane.scheduler.ports import Directory


class PlanMachines:
    """Reads the machines that a plan waits for; changes nothing."""

    def __init__(self, region: Region, directory: Directory) -> None:
        self._machines, self._observations = region.broker.table, region.observations
        self._follows, self._runtime, self._directory = region.follows, region.runtime, directory

    def of(self, plan: PlanRecord, waves: Iterable[WaveRecord]) -> dict[str, ObservedMachine]:
        """Return the machines of a plan that its next step depends on.

        These are the machines of announced waves, of waves from which machines were left out, and
        with `power-cap` of finished waves.
        """
        machines = dict[str, ObservedMachine]()
        if plan.ended is not None:
            return machines
        for wave in waves:
            is_counted = plan.request.work is Work.POWER_CAP and wave.state is WaveState.DONE
            if wave.state is WaveState.ANNOUNCED or wave.left_out or is_counted:
                for name in wave.machines:
                    record = self._machines.find(name)
                    if record is not None:
                        machines[name] = self._observe(plan, record)
        return machines

    def _observe(self, plan: PlanRecord, record: MachineRecord) -> ObservedMachine:
        event = of_plan(record, plan.name, plan.at)
        observation = self._observations.observation(record.machine)
        # another process follows it: then only its record shows its state
        is_elsewhere = not self._follows(record.entitlement)
        is_up = record.state is MachineState.UP and (observation.answering or is_elsewhere)
        deadline = None if event is None else event.deadline
        is_late = deadline is not None and self._runtime.date() >= deadline
        may_stay = plan.request.tasks_survive and is_late
        return ObservedMachine(
            is_open=event is None or event.end is None,
            is_well=is_up and (not record.entitlement or self._is_ready(record)),
            tasks=0 if may_stay else self._leaving_tasks(plan, record, is_reachable=is_up),
            boot=record.facts.boot_id if record.facts is not None else "",
            power_w=record.hardware.power_w if record.hardware is not None else 0,
            is_held=bool(record.entitlement) and plan.request.work is not Work.POWER_CAP,
        )

    def _is_ready(self, record: MachineRecord) -> bool:
        if self._follows(record.entitlement):
            return self._observations.ready(record)
        return record.profile_state is ProfileState.VERIFIED

    def _leaving_tasks(self, plan: PlanRecord, record: MachineRecord, *, is_reachable: bool) -> int:
        """Return how many tasks must still leave a machine.

        A task that its controller had stopped until the work is over counts as gone: it keeps its
        place, and does not run (TC8). A machine that must become empty keeps no places. A machine
        that does not answer may still run its tasks.
        """
        tasks = self._directory.tasks(record.machine)
        if not is_reachable or plan.ends is Ends.EMPTY or not self._follows(record.entitlement):
            return len(tasks)
        running = self._observations.observation(record.machine).tasks
        return sum(1 for task in tasks if task in running)
