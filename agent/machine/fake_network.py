"""The private networks of the machine in memory."""

from __future__ import annotations

from agent.netplan import Gates, NetAnswer, NetRequest, TaskNet, gate_of
from wire.errors import HostError


class FakeNetwork:
    """Networks and permissions, as requested."""

    def __init__(self) -> None:
        self.networks: dict[str, TaskNet] = {}
        self.allowed: list[TaskNet] | None = None
        """Networks in the firewall; None: it was never installed."""
        self.broken = ""
        """Reason for which every request fails; empty: requests succeed."""
        self.unowned: list[str] = []
        """Names of namespaces and links that belong to no task."""
        self.own = "10.77.0.11"
        self.ports: dict[str, list[int]] = {}
        """Programs for ports, by name."""
        self.cgroups: set[str] | None = None
        """Cgroups that can be restricted to ports; None: any."""
        self.held: dict[str, list[int]] = {}
        """Cgroup → the ports that it is restricted to."""

    def ask(self, ask: NetRequest) -> NetAnswer:
        """Carry out a request."""
        if self.broken:
            raise HostError(self.broken)
        if ask.gates is not None:
            return self._gated(ask.gates)
        for task_id in ask.remove:
            self.networks.pop(task_id, None)
        self.unowned = [name for name in self.unowned if name not in (*ask.remove, *ask.unlink)]
        if ask.allowed is not None:
            self.allowed = list(ask.allowed)
        if ask.ensure is not None:
            self.networks[ask.ensure.task_id] = ask.ensure
        return NetAnswer(networks=sorted(self.networks.values(), key=lambda net: net.task_id))

    def _gated(self, gates: Gates) -> NetAnswer:
        if gates.alone:
            self.ports.clear()
        self.ports |= {gate_of(p): p for p in [*gates.wanted, *gates.hold.values()]}
        there = {c: p for c, p in gates.hold.items() if self.cgroups is None or c in self.cgroups}
        self.held |= there
        return NetAnswer(held=sorted(there))

    def has_gate(self, name: str) -> bool:
        """Return whether a port gate exists."""
        return name in self.ports

    def gates(self) -> set[str]:
        """Return the names of port gates."""
        return set(self.ports)

    def address(self) -> str:
        """Return the attribute `own`."""
        return self.own
