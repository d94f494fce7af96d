"""The part of the front end's client about machines, brokers and planned work."""

from __future__ import annotations

from collections.abc import AsyncIterator

from control_plane.api.health import ConfirmDown, ConfirmedDown, HeldBackMachines
from control_plane.api.inventory import (
    BrokerMachines,
    BrokerViews,
    Drain,
    ImportResult,
    Lend,
    MachineScope,
    Records,
    Relabel,
    Revoke,
    Undrain,
)
from control_plane.api.machines import MachineRecord, Machines, MachineView
from control_plane.api.maintenance import (
    GoOn,
    MaintenanceRequest,
    Plans,
    PlanView,
    Preview,
    Reported,
)
from control_plane.route_calls import ROUTE, NamedCalls

_IMPORT_TIMEOUT_S = 3600.0
_CHUNK = 1 << 18


class MachineClient(NamedCalls):
    """Reads machines, and changes their records and planned work.

    Every method raises what the front end raised, or `Unreachable`.
    """

    async def list_machines(self, scope: MachineScope | None = None) -> Machines:
        """Return all machines, or all machines of a scope; reads every page."""
        scope = scope or MachineScope()
        given = {name: getattr(scope, name) for name in MachineScope.__struct_fields__}
        if scope.unavailable is not None:
            given["unavailable"] = "true" if scope.unavailable else "false"
        machines: list[MachineView] = []
        after: str | None = None
        while after != "":
            page = await self.ask(Machines, "list_machines", after=after, **given)
            machines += page.machines
            after = page.next
        return Machines(machines=machines)

    async def get_machine(self, machine: str) -> MachineView:
        """Return a machine, or raise `NotFound`."""
        return await self.ask(MachineView, "get_machine", machine=machine)

    async def remove_machine(self, machine: str) -> None:
        """Forget a free machine that is decommissioned or was replaced."""
        await self.call(ROUTE["remove_machine"], machine=machine)

    async def import_machines(
        self, data: bytes, format_: str = "csv", *, dry_run: bool = False, simulated: bool = False
    ) -> ImportResult:
        """Make the region's machines match a list, in one transaction."""

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(data), _CHUNK):
                yield data[start : start + _CHUNK]

        return await self.ask(
            ImportResult,
            "import_machines",
            stream=chunks(),
            timeout_s=_IMPORT_TIMEOUT_S,
            format=format_,
            dry_run="true" if dry_run else None,
            simulated="true" if simulated else None,
        )

    async def label_machines(self, request: Relabel) -> Records:
        """Set and remove labels of machines."""
        return await self.ask(Records, "label_machines", request)

    async def drain_machines(self, request: Drain) -> Records:
        """Announce that machines will be away: their tasks move, and no new ones come."""
        return await self.ask(Records, "drain_machines", request)

    async def undrain_machines(self, request: Undrain) -> Records:
        """End planned unavailability of machines."""
        return await self.ask(Records, "undrain_machines", request)

    async def lend_machine(self, request: Lend) -> MachineRecord:
        """Give a whole, empty machine to another entitlement for a while."""
        return await self.ask(MachineRecord, "lend_machine", request)

    async def revoke_machines(self, request: Revoke) -> Records:
        """Call lent machines back."""
        return await self.ask(Records, "revoke_machines", request)

    async def held_back_machines(self) -> HeldBackMachines:
        """Return silent machines whose state is not decided yet, and why."""
        return await self.ask(HeldBackMachines, "held_back_machines")

    async def confirm_down(self, request: ConfirmDown) -> ConfirmedDown:
        """Confirm that silent machines are down, whatever holds the verdict back."""
        return await self.ask(ConfirmedDown, "confirm_down", request)

    async def list_brokers(self) -> BrokerViews:
        """Return the resource brokers, one per data center."""
        return await self.ask(BrokerViews, "list_brokers")

    async def broker_machines(self, datacenter: str, name_after: str = "") -> BrokerMachines:
        """Return a page of a broker's machines, and the revision from which to watch them."""
        return await self.ask(
            BrokerMachines, "broker_machines", datacenter=datacenter, name_after=name_after or None
        )

    async def broker_changes(
        self, datacenter: str, after: int, wait_s: float = 0.0
    ) -> BrokerMachines:
        """Return a broker's changes after a revision; waits for the first."""
        return await self.ask(
            BrokerMachines,
            "broker_machines",
            timeout_s=wait_s + 30.0,
            datacenter=datacenter,
            after=after,
            wait_s=wait_s,
        )

    async def list_plans(self) -> Plans:
        """Return all planned work on machines, the newest first."""
        return await self.ask(Plans, "list_plans")

    async def get_plan(self, name: str) -> PlanView:
        """Return a plan with all its waves."""
        return await self.ask(PlanView, "get_plan", plan=name)

    async def preview_plan(self, name: str, request: MaintenanceRequest) -> Preview:
        """Return the effect of planned work on jobs; changes nothing."""
        return await self.ask(Preview, "preview_plan", request, plan=name)

    async def accept_plan(self, name: str, request: MaintenanceRequest) -> PlanView:
        """Announce planned work on machines, wave by wave."""
        return await self.ask(PlanView, "accept_plan", request, plan=name)

    async def cancel_plan(self, name: str) -> PlanView:
        """Cancel planned work."""
        return await self.ask(PlanView, "cancel_plan", plan=name)

    async def report_plan(self, name: str, request: Reported) -> PlanView:
        """Report that the work on some machines is over."""
        return await self.ask(PlanView, "report_plan", request, plan=name)

    async def resume_plan(self, name: str, request: GoOn) -> PlanView:
        """Continue a paused plan."""
        return await self.ask(PlanView, "resume_plan", request, plan=name)
