"""The present state of a lab."""

import contextlib

import msgspec

from vm_lab.control import LabControlPlane
from vm_lab.errors import LabError
from vm_lab.lab import Lab

_ANSWER_S = 10.0
"""Time in which the control plane must answer; a paused one never does."""


class MachineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One VM and its place."""

    name: str
    power: str
    """State in libvirt: "running", "paused", "shut off", or "absent"."""
    connected: bool
    """Its link is plugged into the lab's network."""
    agent: str
    """State in the control plane; empty if no control plane runs."""
    address: str
    datacenter: str
    msb: str
    row: str
    rack: str
    type: str


class LabStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A lab and its machines."""

    name: str
    running: bool
    accel: str
    image: str
    state_dir: str
    control_plane: str
    """Its address, empty when it does not run."""
    endpoint: str
    """For `twinectl --endpoint`, empty when it does not run."""
    control_plane_error: str = ""
    """Why it did not answer, such as while it is paused; empty: it answered, or does not run."""
    snapshots: tuple[str, ...]
    machines: tuple[MachineStatus, ...]


def lab_status(lab: Lab) -> LabStatus:
    """Return the state of the lab."""
    record = lab.paths.get_record()
    running = lab.sandbox.holder() is not None
    served = running and lab.control.pid() is not None
    agents, error = agent_states(lab.control) if served else ({}, "")
    return LabStatus(
        name=record.name,
        running=running,
        accel=record.accel,
        image=record.image,
        state_dir=str(lab.paths.state),
        control_plane=lab.control.url if served else "",
        endpoint=lab.control.endpoint if served else "",
        control_plane_error=error,
        snapshots=tuple(sorted(p.name for p in lab.paths.snapshots.glob("*"))),
        machines=_machines(lab, agents, running=running),
    )


def status_table(status: LabStatus) -> str:
    """Return the status as a table."""
    lines = [
        f"lab {status.name}: {'up' if status.running else 'down'}, {status.accel.upper()}, "
        f"image {status.image}, state in {status.state_dir}",
        f"control plane: {status.control_plane or 'not running'}",
    ]
    if status.control_plane_error:
        lines.append(f"it does not answer: {status.control_plane_error}")
    if status.endpoint:
        lines.append(f"reach it with: twinectl --endpoint {status.endpoint} …")
    row = "{:<8}{:<10}{:<11}{:<10}{:<13}{}"
    lines.append(row.format("MACHINE", "POWER", "NETWORK", "AGENT", "ADDRESS", "PLACE"))
    for m in status.machines:
        network = "connected" if m.connected else "cut off"
        place = f"{m.datacenter}/{m.msb}/{m.row}/{m.rack} {m.type}"
        lines.append(row.format(m.name, m.power, network, m.agent or "-", m.address, place))
    if status.snapshots:
        lines.append(f"snapshots: {' '.join(status.snapshots)}")
    return "\n".join(lines)


def agent_states(control: LabControlPlane) -> tuple[dict[str, str], str]:
    """Return the state of each machine in the control plane, and why it is unknown."""
    try:
        return control.machine_states(_ANSWER_S), ""
    except LabError as e:
        return {}, str(e)


def _machines(lab: Lab, agents: dict[str, str], *, running: bool) -> tuple[MachineStatus, ...]:
    power = lab.domains.power() if running and lab.sandbox.libvirtd_answers() else {}
    return tuple(
        MachineStatus(
            name=m.name,
            power=power.get(m.name, "absent"),
            connected=power.get(m.name) == "running" and _connected(lab, m.name),
            agent=agents.get(m.name, ""),
            address=str(m.address),
            datacenter=m.datacenter,
            msb=m.msb,
            row=m.row,
            rack=m.rack,
            type=m.type,
        )
        for m in lab.machines()
    )


def _connected(lab: Lab, name: str) -> bool:
    with contextlib.suppress(LabError):
        return lab.domains.connected(name)
    return False
