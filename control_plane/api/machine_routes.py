"""The front end's routes about machines and their brokers; joined into `api.routes`."""

from __future__ import annotations

from agent.api import Ack
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
from control_plane.api.machines import MachineRecord, Machines, MachineView, RegionMap
from control_plane.api.people import Needs
from wire.routes import Route

_MACHINE = "/v1/machines/{machine}"

MACHINE_ROUTES: tuple[Route, ...] = (
    Route(
        "list_machines",
        "GET",
        "/v1/machines",
        query=(*MachineScope.__struct_fields__, "search", "sort", "after", "limit"),
        response=Machines,
        needs=Needs.VIEWER,
        summary="Machines by place, type, owner and state, in pages",
    ),
    Route(
        "map_region",
        "GET",
        "/v1/region-map",
        query=("by",),
        response=RegionMap,
        needs=Needs.VIEWER,
        is_costly=True,
        summary=(
            "Counts of all machines by rack and by state, entitlement, profile, load or power"
        ),
    ),
    Route(
        "get_machine",
        "GET",
        _MACHINE,
        response=MachineView,
        needs=Needs.VIEWER,
        summary="One machine",
    ),
    Route(
        "remove_machine",
        "DELETE",
        _MACHINE,
        response=Ack,
        needs=Needs.OPERATOR,
        summary="Remove a free machine that is decommissioned or was replaced",
    ),
    Route(
        "import_machines",
        "POST",
        "/v1/machines:import",
        query=("format", "dry_run", "simulated"),
        stream_in=True,
        response=ImportResult,
        needs=Needs.OPERATOR,
        summary="Bring the machines in line with a list, CSV or JSON",
    ),
    Route(
        "drain_machines",
        "POST",
        "/v1/machines:drain",
        request=Drain,
        response=Records,
        needs=Needs.OPERATOR,
        summary="Announce planned unavailability of machines; their tasks move",
    ),
    Route(
        "undrain_machines",
        "POST",
        "/v1/machines:undrain",
        request=Undrain,
        response=Records,
        needs=Needs.OPERATOR,
        summary="End planned unavailability of machines",
    ),
    Route(
        "label_machines",
        "POST",
        "/v1/machines:label",
        request=Relabel,
        response=Records,
        needs=Needs.OPERATOR,
        summary="Set and remove labels of machines, for use in requirements",
    ),
    Route(
        "lend_machine",
        "POST",
        "/v1/machines:lend",
        request=Lend,
        response=MachineRecord,
        needs=Needs.OPERATOR,
        summary="Lend an empty machine to another entitlement for a while",
    ),
    Route(
        "revoke_machines",
        "POST",
        "/v1/machines:revoke",
        request=Revoke,
        response=Records,
        needs=Needs.OPERATOR,
        summary="Revoke loans of machines",
    ),
    Route(
        "list_brokers",
        "GET",
        "/v1/brokers",
        response=BrokerViews,
        needs=Needs.VIEWER,
        summary="The resource brokers, one per data center",
    ),
    Route(
        "broker_machines",
        "GET",
        "/v1/brokers/{datacenter}/machines",
        query=("after", "wait_s", "name_after", "limit"),
        response=BrokerMachines,
        needs=Needs.VIEWER,
        summary="A broker's machines, or the changes after a revision; waits up to wait_s",
    ),
)
