"""One machine as text: hardware, place, promises and events, as `twinectl machine` prints them."""

from __future__ import annotations

import time

from agent.api import MachineFacts
from control_plane.api.machines import Hardware, MachineRecord, MachineView, UnavailabilityEvent
from control_plane.cli import show
from wire.units import about_size

LEVELS = ("region", "datacenter", "msb", "row", "rack")
_SOON_S = 7 * 86_400.0
"""A certificate that ends within this time is shown with a warning."""


def print_machine(view: MachineView) -> None:
    """Print one machine as a table of properties."""
    record, facts, place = view.record, view.record.facts, view.record.location
    levels = [getattr(place, level) for level in LEVELS]
    rows: list[tuple[str, object]] = [
        ("machine", record.machine),
        ("state", record.state.value + ("" if view.ready else ", not ready")),
        *([("health", view.health)] if view.health else []),
        *([("identity", view.duplicate)] if view.duplicate else []),
        ("last seen", show.duration(view.last_seen_s) + " ago"),
        ("address", record.address or "-"),
        ("type", record.machine_type),
        ("place", "/".join([*levels, record.machine])),
        *([("cluster", record.cluster)] if record.cluster else []),
        *([("labels", labels_text(record))] if record.labels else []),
        *_hardware(record.hardware),
        *(_facts(facts) if facts else [("agent", "has not joined yet")]),
        ("entitlement", record.entitlement or "(free pool)"),
        *_loan_and_hold(record),
        ("profile", f"{record.profile or '-'} ({record.profile_state.value})"),
        ("profile wanted", record.profile_wanted or "-"),
        ("tasks", ", ".join(view.tasks) or "-"),
        *(("event", _event(event)) for event in record.unavailability),
    ]
    show.table(("what", "value"), rows)


def labels_text(record: MachineRecord) -> str:
    """Return the labels of a machine as they are written, `-` for none."""
    return " ".join(f"{name}={text}" for name, text in sorted((record.labels or {}).items())) or "-"


def _hardware(hardware: Hardware | None) -> list[tuple[str, object]]:
    if hardware is None:
        return []
    parts = [
        (hardware.generation, ""),
        (hardware.sku, "SKU "),
        (f"{hardware.rru:g}" if hardware.rru else "", "RRU "),
        (str(hardware.cpus or ""), "CPUs "),
        (about_size(hardware.memory_bytes) if hardware.memory_bytes else "", "memory "),
        (f"{hardware.gpus} x {hardware.gpu_type}" if hardware.gpus else "", "GPUs "),
        (f"{hardware.network_mbps} Mbit/s" if hardware.network_mbps else "", ""),
        (about_size(hardware.disk_bytes) if hardware.disk_bytes else "", "disk "),
        (f"{hardware.power_w} W" if hardware.power_w else "", ""),
    ]
    return [("hardware", ", ".join(f"{word}{value}" for value, word in parts if value) or "-")]


def _facts(facts: MachineFacts) -> list[tuple[str, object]]:
    return [
        ("cpus", f"{facts.cpus} ({facts.sockets} socket(s), {facts.cpu_model})"),
        ("memory", about_size(facts.memory_bytes)),
        ("disk", f"{about_size(facts.disk_bytes)}, {about_size(facts.disk_free_bytes)} free"),
        ("kernel", facts.kernel),
        ("agent", facts.agent_version),
        ("capabilities", ", ".join(facts.capabilities) or "-"),
        ("profiles", ", ".join(facts.profiles) or "-"),
    ]


def _loan_and_hold(record: MachineRecord) -> list[tuple[str, object]]:
    """Return the loan and the hold of a machine, if any."""
    rows: list[tuple[str, object]] = []
    if record.loan is not None:
        owner = record.loan.donor or "the free pool"
        back_by = record.loan.return_by
        back = "" if back_by is None else f", back by {at_text(back_by)}"
        rows.append(("on loan", f"from {owner} since {at_text(record.loan.since)}{back}"))
    if record.hold is not None:
        hold = record.hold
        since = at_text(hold.since)
        text = f"for {hold.entitlement} by transaction {hold.transaction} since {since}"
        rows.append(("held", text))
    return rows


def _event(event: UnavailabilityEvent) -> str:
    text = f"{event.kind.value}: {event.reason}; from {at_text(event.start)}"
    if event.end is not None:
        return f"{text}, ended {at_text(event.end)}"
    if event.deadline is not None:
        text += f", deadline {at_text(event.deadline)}"
    if event.expected_duration_s is not None:
        text += f", takes {show.duration(event.expected_duration_s)}"
    if event.tasks_survive:
        text += ", tasks run on"
    return text


def at_text(moment: float) -> str:
    """Return a moment as text: UTC, and how far away it is."""
    text = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(moment))
    away = moment - time.time()
    return f"{text} (in {show.duration(away)})" if away > 0 else f"{text} ({show.ago(moment)} ago)"


def open_events(record: MachineRecord) -> list[UnavailabilityEvent]:
    """Return the unavailability events of a machine that have not ended."""
    return [event for event in record.unavailability if event.end is None]


def identity_warning(view: MachineView) -> str:
    """Return a warning if the certificate of a host is not renewed."""
    ends = view.identity_not_after
    left_s = float("inf") if ends is None else ends - time.time()
    second = ", a clone has its identity" if view.duplicate else ""
    if left_s < _SOON_S:
        return f"{second}, identity ends in {max(0.0, left_s) / 86_400:.1f} d"
    return second
