"""Operators of a simulated region: they plan work on machines in waves, and do it.

They send a plan to the ops planner, and read it every few seconds. They reboot the machines on
which work may begin, and cancel the plan at the end. Plans overlap with other plans, drains,
releases and faults.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from control_plane.api.maintenance import (
    GoOn,
    MaintenanceRequest,
    PlanState,
    PlanView,
    WaveState,
    Within,
    Work,
)
from control_plane.roles import ControlPlane
from vm_lab.region.clients import ClientRequest
from vm_lab.region.network import Condition
from vm_lab.region.story import Fault
from wire.errors import Busy, Conflict

if TYPE_CHECKING:
    from vm_lab.region.seed import SimulatedRegion

READ_EVERY_S = 5.0
REBOOT_S = 60.0
"""Expected duration of a reboot, in seconds."""
WAVE_SIZE = 2
"""Most machines of a wave."""
SWITCH_S = 90.0
"""Seconds that the machines of a replaced switch are unreachable."""


class OperatorPlan:
    """One plan, from its request to its end."""

    def __init__(
        self, region: SimulatedRegion, fault: Fault, number: int, request: MaintenanceRequest
    ) -> None:
        """Request the plan for the machines that the event names."""
        self._region, self._name = region, f"plan{number}"
        self._machines = [p.machine for p in region.places if p.within(fault.target)]
        reason = f"work {number}"
        self._request = replace(request, machines=self._machines, reason=reason, despite=True)
        self._number = number
        self._rebooted: set[str] = set()
        self._asked_at = 0.0
        self._is_over = False
        self._view: PlanView | None = None
        self._submit(
            f"{request.work} of {' '.join(self._machines)}", self._send_plan, self._plan_accepted
        )
        region.timeline.after(fault.seconds, self._end)

    def _submit(self, text: str, send: object, granted: object) -> None:
        request = ClientRequest(f"plan {self._name}", text, send, granted)  # type: ignore[arg-type]
        self._region.clients.submit(request)

    async def _send_plan(self, cp: ControlPlane) -> None:
        self._asked_at = self._region.timeline.now
        try:
            await cp.maintenance.accept(self._name, self._request, "operator")
        except Conflict:
            if cp.maintenance.show(self._name).plan.ended is not None:
                raise

    def _plan_accepted(self) -> None:
        self._region.timeline.after(READ_EVERY_S, self._request_view)
        if self._request.work is Work.KERNEL and self._request.deadline_s is not None:
            deadline = self._asked_at + self._request.deadline_s
            self._region.checker.budgets.maintenance_announced(self._machines, deadline)
        if self._request.work is Work.SWITCH:
            self._region.timeline.after(self._request.deadline_s or 0.0, self._replace_switch)

    def _replace_switch(self) -> None:
        network, cut = self._region.network, Condition(cut_in=True, cut_out=True)
        for machine in map(self._region.machines.__getitem__, self._machines):
            network.impose(self._number, machine, cut)
            self._region.timeline.after(SWITCH_S, network.lift, self._number, machine)

    def _request_view(self) -> None:
        if not self._is_over:
            self._submit(f"look at {self._name}", self._read_view, self._handle_view)

    async def _read_view(self, cp: ControlPlane) -> None:
        self._view = cp.maintenance.show(self._name)
        if self._view.plan.state is PlanState.PAUSED and len(self._rebooted) % 2:
            self._view = await cp.maintenance.continue_plan(self._name, GoOn(without=True))

    def _handle_view(self) -> None:
        view = self._view
        if view is None or view.plan.ended is not None:
            return
        open_waves = [w for w in view.waves if w.state is WaveState.ANNOUNCED]
        self._region.checker.budgets.check_waves(self._name, len(open_waves), self._request.work)
        for name in (name for wave in open_waves for name in wave.ready):
            machine = self._region.machines[name]
            if self._request.work is not Work.SWITCH and name not in self._rebooted and machine.on:
                self._rebooted.add(name)
                machine.reboot()
        self._region.timeline.after(READ_EVERY_S, self._request_view)

    def _end(self) -> None:
        self._is_over = True
        self._submit(f"cancel {self._name}", self._cancel, lambda: None)

    async def _cancel(self, cp: ControlPlane) -> None:
        if self._request.work is Work.KERNEL and self._request.deadline_s is not None:
            self._region.checker.budgets.maintenance_cancelled(self._machines)
        if cp.maintenance.show(self._name).plan.ended is None:
            await cp.maintenance.cancel(self._name)


def upgrade(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Plan to reboot machines for a kernel: wave by wave, or all with a deadline."""
    if fault.value:
        request = MaintenanceRequest(
            work=Work.KERNEL, reason="-", deadline_s=fault.value, duration_s=REBOOT_S
        )
    else:
        request = _in_waves(Work.KERNEL)
    OperatorPlan(region, fault, number, request)


def power_cap(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Cap the power of machines, so that tasks leave them, and lift the cap at the end.

    Wave by wave; with a `value` all machines at once, as if a power feed had failed.
    """
    if fault.value:
        request = MaintenanceRequest(work=Work.POWER_CAP, reason="-")
    else:
        request = _in_waves(Work.POWER_CAP)
    OperatorPlan(region, fault, number, request)


def switch(region: SimulatedRegion, fault: Fault, number: int) -> None:
    """Announce that machines will be unreachable, and cut them off at the deadline (TC9)."""
    request = MaintenanceRequest(
        work=Work.SWITCH,
        reason="-",
        deadline_s=fault.value,
        duration_s=SWITCH_S,
        tasks_survive=True,
    )
    OperatorPlan(region, fault, number, request)


def _in_waves(work: Work) -> MaintenanceRequest:
    return MaintenanceRequest(
        work=work, reason="-", wave_size=WAVE_SIZE, within=Within.RACK, return_within_s=60.0
    )


def move_entitlement(region: SimulatedRegion, _: Fault, number: int) -> None:
    """Move an entitlement to another shard, unless it is busy."""
    names, shards = sorted(region.clients.entitlements), region.plane.shards
    if not names or shards < 2:
        return
    name, to = names[number % len(names)], (number // len(names)) % shards

    async def send(cp: ControlPlane) -> None:
        with suppress(Busy, Conflict):  # a store that fails, or a job between two entitlements
            await cp.shards.move(name, to)

    text = f"move entitlement {name} to shard {to} {number}"
    region.clients.submit(ClientRequest(f"shard of {name}", text, send, lambda: None))
