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
from control_plane.api.route_rows import operator_row, viewer_row
from wire.routes import Route

_MACHINE = "/v1/machines/{machine}"

MACHINE_ROUTES: tuple[Route, ...] = (
    viewer_row(
        "list_machines",
        "/v1/machines",
        Machines,
        "Machines by place, type, owner and state, in pages",
        query=(*MachineScope.__struct_fields__, "search", "sort", "after", "limit"),
    ),
    viewer_row(
        "map_region",
        "/v1/region-map",
        RegionMap,
        "Counts of all machines by rack and by state, entitlement, profile, load or power",
        query=("by",),
        is_costly=True,
    ),
    viewer_row("get_machine", _MACHINE, MachineView, "One machine"),
    operator_row(
        "remove_machine",
        f"DELETE {_MACHINE}",
        Ack,
        "Remove a free machine that is decommissioned or was replaced",
    ),
    operator_row(
        "import_machines",
        "POST /v1/machines:import",
        ImportResult,
        "Bring the machines in line with a list, CSV or JSON",
        query=("format", "dry_run", "simulated"),
        stream_in=True,
    ),
    operator_row(
        "drain_machines",
        "POST /v1/machines:drain",
        Records,
        "Announce planned unavailability of machines; their tasks move",
        request=Drain,
    ),
    operator_row(
        "undrain_machines",
        "POST /v1/machines:undrain",
        Records,
        "End planned unavailability of machines",
        request=Undrain,
    ),
    operator_row(
        "label_machines",
        "POST /v1/machines:label",
        Records,
        "Set and remove labels of machines, for use in requirements",
        request=Relabel,
    ),
    operator_row(
        "lend_machine",
        "POST /v1/machines:lend",
        MachineRecord,
        "Lend an empty machine to another entitlement for a while",
        request=Lend,
    ),
    operator_row(
        "revoke_machines",
        "POST /v1/machines:revoke",
        Records,
        "Revoke loans of machines",
        request=Revoke,
    ),
    viewer_row(
        "list_brokers", "/v1/brokers", BrokerViews, "The resource brokers, one per data center"
    ),
    viewer_row(
        "broker_machines",
        "/v1/brokers/{datacenter}/machines",
        BrokerMachines,
        "A broker's machines, or the changes after a revision; waits up to wait_s",
        query=("after", "wait_s", "name_after", "limit"),
    ),
)
