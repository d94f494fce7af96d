"""Machines for tests of the control plane."""

from collections.abc import Mapping
from typing import Any

from agent.api import Location, MachineFacts
from agent.api.joining import JoinRequest
from control_plane.api.machines import MachineRecord
from control_plane.broker.broker import Broker
from control_plane.broker.brokers import Brokers
from control_plane.broker.holds import Take
from control_plane.runtime.runtime import Runtime
from control_plane.store import Store


def a_machine(name: str, datacenter: str = "dc1", **fields: Any) -> MachineRecord:
    values = {
        "machine": name,
        "location": Location(datacenter=datacenter),
        "machine_type": "web",
    }
    return MachineRecord(**(values | fields))


def some_facts(name: str = "m1", **fields: Any) -> MachineFacts:
    """Return what a machine with 1 GiB and two CPUs reports."""
    values = {
        "machine_id": name,
        "boot_id": "boot-1",
        "kernel": "6.12",
        "cpu_model": "test",
        "cpus": 2,
        "sockets": 1,
        "numa_nodes": 1,
        "memory_bytes": 1 << 30,
        "disk_bytes": 1 << 34,
        "disk_free_bytes": 1 << 33,
        "agent_version": "0",
    }
    return MachineFacts(**(values | fields))


def a_join(name: str, datacenter: str = "dc1", **fields: Any) -> JoinRequest:
    values = {
        "token": "",
        "machine": name,
        "csr_pem": "",
        "address": f"{name}.example:7443",
        "location": Location(datacenter=datacenter),
        "facts": some_facts(name),
    }
    return JoinRequest(**(values | fields))


def a_region_of(
    *, datacenters: int, msbs: int, rows: int, racks: int, machines: int
) -> dict[str, MachineRecord]:
    """Return a full tree of places, with `machines` in each rack, named in order."""
    found = {}
    for dc in range(datacenters):
        for msb in range(msbs):
            for row in range(rows):
                for rack in range(racks):
                    place = [f"dc{dc}", f"msb{msb}", f"row{row}", f"rack{rack}"]
                    names = ["-".join(place[: i + 1]) for i in range(4)]
                    location = Location(
                        datacenter=names[0], msb=names[1], row=names[2], rack=names[3]
                    )
                    for _ in range(machines):
                        name = f"m{len(found):05}"
                        found[name] = a_machine(name, location=location)
    return found


async def loaded(
    store: Store, stores: Mapping[str, Store] | None = None, now: float = 1000.0
) -> Brokers:
    brokers = Brokers(store, Runtime(lambda: now, boot=lambda: now), stores)
    await brokers.load()
    return brokers


async def assign(broker: Broker, machine: str, entitlement: str, profile: str = "web") -> None:
    """Give a free machine to an entitlement as the allocator does: hold it, then commit."""
    transaction = f"{machine}:{entitlement}"
    await broker.holds.prepare(transaction, {machine: Take(entitlement, profile)})
    await broker.holds.commit(transaction)
