"""The rack, MSB and data center of each VM, read from `topology.toml`."""

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import msgspec

from vm_lab.errors import LabError

DEFAULT_FILE = Path(__file__).with_name("topology.toml")


class LabMachine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One VM: its name, its address, and its place in the region."""

    name: str
    address: IPv4Address
    datacenter: str
    msb: str
    row: str
    rack: str
    type: str

    @property
    def mac(self) -> str:
        """Return the MAC address of its network card, derived from its IP address.

        52:54:00 is QEMU's prefix; DHCP assigns the fixed IP address by the MAC address.
        """
        return "52:54:00:" + ":".join(f"{byte:02x}" for byte in self.address.packed[1:])


class VmSize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of VMs, and the size of each."""

    count: int
    cpus: int
    memory_mib: int


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lab's region."""

    region: str
    network: IPv4Network
    host_address: IPv4Address
    control_plane_port: int
    agent_port: int
    vm: VmSize
    machine: tuple[LabMachine, ...]

    def first(self, count: int) -> tuple[LabMachine, ...]:
        """Return the first `count` machines; the lab cannot have more than are listed."""
        if not 1 <= count <= len(self.machine):
            raise LabError(
                f"cannot have {count} machines: topology.toml lists {len(self.machine)}",
                hint="add [[machine]] tables, or ask for fewer",
            )
        return self.machine[:count]

    def get_machine(self, name: str) -> LabMachine:
        """Return the machine of that name."""
        for machine in self.machine:
            if machine.name == name:
                return machine
        known = " ".join(m.name for m in self.machine)
        raise LabError(f"no machine {name!r} in topology.toml", hint=f"machines are: {known}")


def read_topology(file: Path = DEFAULT_FILE) -> Topology:
    """Return the topology in a file. Raises `LabError` with the field that is wrong."""
    try:
        topology = msgspec.toml.decode(file.read_bytes(), type=Topology, dec_hook=_decode)
    except (OSError, msgspec.DecodeError) as e:
        raise LabError(f"cannot read the topology {file}: {e}") from e
    _check(topology, file)
    return topology


def _decode(kind: type, value: object) -> object:
    """Return an address or a network from its text; msgspec supports neither type."""
    return kind(value)


def _check(topology: Topology, file: Path) -> None:
    names = [m.name for m in topology.machine]
    addresses = [m.address for m in topology.machine]
    if len(set(names)) < len(names) or len(set(addresses)) < len(addresses):
        raise LabError(f"{file}: two machines have the same name or address")
    outside = [m.name for m in topology.machine if m.address not in topology.network]
    if outside or topology.host_address not in topology.network:
        raise LabError(f"{file}: not in network {topology.network}: {outside or 'host_address'}")
