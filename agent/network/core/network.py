"""Properties of a task's unit that follow from its network (docs/network.md)."""

from __future__ import annotations

from agent.api import NetworkMode, TaskSpec
from agent.api.network import port_variable
from agent.netplan import BIND_HOOKS, GATES, gate_of

NAMESPACES = "/run/twine/netns"
"""Folder of the network namespaces of tasks, each named by its task."""
INET = ("AF_INET", "AF_INET6")


def is_private(spec: TaskSpec) -> bool:
    """Return whether a task has a private network."""
    return spec.network.mode is NetworkMode.PRIVATE


def ports_of(spec: TaskSpec) -> list[int]:
    """Return the ports that a task may bind in the host's network, in ascending order.

    The ports of its probes are included, because the task listens there.
    """
    given = set(spec.network.ports.values())
    probes = (spec.probe, spec.life.startup, spec.life.liveness)
    return sorted(given | {p.port for p in probes if p is not None and p.port is not None})


def gate_for(spec: TaskSpec) -> str:
    """Return the name of the gate for a task's ports; empty in a private network."""
    return "" if is_private(spec) else gate_of(ports_of(spec))


def port_variables(spec: TaskSpec) -> dict[str, str]:
    """Return the environment that names a task's ports."""
    return {port_variable(name): str(port) for name, port in spec.network.ports.items()}


def network_properties(task_id: str, spec: TaskSpec) -> dict[str, object]:
    """Return the properties that confine a task to its network, in addition to the hardening.

    In the host's network neither a namespace nor systemd (which has no Landlock) separates
    abstract sockets. So the whole family AF_UNIX is forbidden there, unless the task requests it.
    `socketpair` works anyway (systemd.exec(5), RestrictAddressFamilies=). Netlink shows the
    network of the namespace, so it is allowed in a private network.
    """
    if is_private(spec):
        return {
            "NetworkNamespacePath": f"{NAMESPACES}/{task_id}",
            "RestrictAddressFamilies": (*INET, "AF_UNIX", "AF_NETLINK"),
        }
    unix = ("AF_UNIX",) if spec.network.unix_sockets else ()
    gate = f"{GATES}/{gate_for(spec)}"
    return {
        "RestrictAddressFamilies": (*INET, *unix),
        "BPFProgram": [f"{kind}:{gate}/{kind}" for kind in BIND_HOOKS],
    }
