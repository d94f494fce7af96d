"""The front end's handlers about machines and their brokers."""

from __future__ import annotations

from typing import Any

import msgspec

from agent.api import Ack
from control_plane.api.inventory import (
    BrokerMachines,
    BrokerViews,
    ImportResult,
    MachineScope,
    Records,
)
from control_plane.api.machines import MachineRecord, Machines, MachineView, RegionMap
from control_plane.broker.service import MAX_PAGE, MachineQuery
from control_plane.front_end.handlers import PlaneHandlers
from wire.errors import InvalidInput, TooLarge
from wire.routes import invalid
from wire.server import Call
from wire.violations import violations

MAX_WAIT_S = 60.0
MAX_INVENTORY_BYTES = 512 << 20
"""Maximum size of an imported list; a million machines take about 150 MB."""
FORMATS = ("csv", "json")


class MachineHandlers(PlaneHandlers):
    """A handler for each row of `api.machine_routes`."""

    async def list_machines(self, call: Call) -> Machines:
        """List machines."""
        query = call.query
        wanted = MachineQuery(_scope(call), query.get("search", ""), query.get("sort", "name"))
        return await self._plane.inventory.page(
            wanted, query.get("after", ""), call.limit(MAX_PAGE)
        )

    async def map_region(self, call: Call) -> RegionMap:
        """Count the machines by place and by one fact."""
        return await self._plane.inventory.region_map(call.query.get("by", "state"))

    async def get_machine(self, call: Call) -> MachineView:
        """Show a machine."""
        return self._plane.inventory.get(call.path["machine"])

    async def remove_machine(self, call: Call) -> Ack:
        """Remove a machine."""
        await self._plane.inventory.remove(call.path["machine"])
        return Ack()

    async def import_machines(self, call: Call) -> ImportResult:
        """Import a list of machines."""
        assert call.stream is not None
        format_ = call.query.get("format", "csv")
        if format_ not in FORMATS:
            raise InvalidInput(f"parameter format must be csv or json, not {format_!r}")
        data = bytearray()
        async for chunk in call.stream:
            data += chunk
            if len(data) > MAX_INVENTORY_BYTES:
                raise TooLarge(f"the list is over {MAX_INVENTORY_BYTES} bytes")
        return await self._plane.inventory.import_inventory(
            bytes(data), format_, simulated=call.flag("simulated"), dry_run=call.flag("dry_run")
        )

    async def drain_machines(self, call: Call) -> Records:
        """Announce that machines will be unavailable."""
        return await self._plane.inventory.drain(call.body)

    async def undrain_machines(self, call: Call) -> Records:
        """End planned unavailability of machines."""
        return await self._plane.inventory.undrain(call.body)

    async def label_machines(self, call: Call) -> Records:
        """Set and remove labels."""
        return await self._plane.inventory.label(call.body)

    async def lend_machine(self, call: Call) -> MachineRecord:
        """Lend a machine."""
        return await self._plane.inventory.lend(call.body)

    async def revoke_machines(self, call: Call) -> Records:
        """Revoke loans."""
        return await self._plane.inventory.revoke(call.body)

    async def list_brokers(self, _: Call) -> BrokerViews:
        """List the brokers."""
        return self._plane.inventory.brokers()

    async def broker_machines(self, call: Call) -> BrokerMachines:
        """Show a broker's machines, or their changes."""
        datacenter, limit = call.path["datacenter"], call.limit(MAX_PAGE)
        after = call.whole("after")
        if after is None:
            name_after = call.query.get("name_after", "")
            return await self._plane.inventory.broker_page(datacenter, name_after, limit)
        wait_s = waiting_time(call)
        return await self._plane.inventory.broker_changes(datacenter, after, limit, wait_s)


def waiting_time(call: Call) -> float:
    """Return how many seconds a caller waits for changes."""
    return min(call.number("wait_s", 0.0) or 0.0, MAX_WAIT_S)


def _scope(call: Call) -> MachineScope:
    """Return the scope that the query describes; an empty entitlement is the free pool."""
    given: dict[str, Any] = {
        name: v for name, v in call.query.items() if name in MachineScope.__struct_fields__
    }
    if "unavailable" in given:
        given["unavailable"] = call.flag("unavailable")
    if found := violations(given, MachineScope):
        raise invalid(found, "the query")
    return msgspec.convert(given, MachineScope)
