"""The properties that a task's network sets in its unit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from builders import a_spec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.api import Limits, Network, NetworkMode, Probe, TaskSpec
from agent.machine.unit_properties import encode
from agent.netplan import gate_of
from agent.network.core.network import network_properties, ports_of
from agent.runtime.core.records import key_of
from agent.tasks.core.unit_properties import unit_properties


@pytest.mark.behaviour("BUG-AG10")
def test_a_task_in_the_hosts_network_binds_its_own_ports_and_no_other() -> None:
    """The task could bind a neighbour's port, or the agent's while the agent restarts."""
    spec = a_spec(network=Network(ports={"http": 8080, "admin": 81}), probe=Probe(port=9000))

    found = unit_properties("web", spec, "/r")

    gate = "/sys/fs/bpf/twine-ports/81-8080-9000"
    assert found["BPFProgram"] == [f"bind4:{gate}/bind4", f"bind6:{gate}/bind6"]
    assert "169.254.0.0/16" in found["IPAddressDeny"]  # type: ignore[operator]
    none = unit_properties("web", a_spec(), "/r")["BPFProgram"]
    assert none == [f"{k}:/sys/fs/bpf/twine-ports/none/{k}" for k in ("bind4", "bind6")]
    assert encode(found)


@given(st.sets(st.integers(1, 65535), max_size=67))
def test_the_name_of_a_gate_has_its_ports_or_their_hash(ports: set[int]) -> None:
    """Two sets never share a name, and every name is a valid folder name."""
    name = gate_of(ports)

    assert 0 < len(name) <= 64
    assert "/" not in name
    assert name == gate_of(sorted(ports, reverse=True))
    if ports and len(name) != 32:
        assert {int(word) for word in name.split("-")} == ports


@pytest.mark.behaviour("BUG-AG10")
def test_abstract_sockets_of_the_host_are_closed_unless_requested() -> None:
    """In the host's network the sandbox can close them only with the whole address family."""
    closed = unit_properties("web", a_spec(), "/r")
    opened = unit_properties("web", a_spec(network=Network(unix_sockets=True)), "/r")

    assert closed["RestrictAddressFamilies"] == ("AF_INET", "AF_INET6")
    assert opened["RestrictAddressFamilies"] == ("AF_INET", "AF_INET6", "AF_UNIX")


def test_a_private_network_is_a_namespace_named_by_the_task_with_all_ports_free() -> None:
    spec = a_spec(network=Network(mode=NetworkMode.PRIVATE))

    assert network_properties("web-0", spec) == {
        "NetworkNamespacePath": "/run/twine/netns/web-0",
        "RestrictAddressFamilies": ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"),
    }
    assert "AF_UNIX" in unit_properties("web-0", spec, "/r")["RestrictAddressFamilies"]  # type: ignore[operator]


def test_ports_are_handed_over_by_name_and_the_owner_has_the_last_word() -> None:
    spec = a_spec(
        network=Network(ports={"http": 8080, "my-admin": 81}),
        environment={"TWINE_PORT_HTTP": "1"},
    )

    environment = unit_properties("web", spec, "/r")["Environment"]

    assert "TWINE_PORT_MY_ADMIN=81" in environment  # type: ignore[operator]
    assert "TWINE_PORT_HTTP=1" in environment  # type: ignore[operator]


@pytest.mark.behaviour("F-05")
def test_another_network_is_another_process_and_the_default_changes_no_key() -> None:
    spec = TaskSpec(image="sha256:" + "1" * 64, command=["/bin/server"])
    keys = {
        key_of(replace(spec, network=network))
        for network in (
            Network(),
            Network(ports={"a": 1, "b": 2}),
            Network(ports={"b": 2, "a": 1}),
            Network(ports={"a": 1}),
            Network(mode=NetworkMode.PRIVATE),
        )
    }

    assert len(keys) == 4
    assert key_of(spec) == key_of(replace(spec, limits=Limits(tasks_max=3)))
    assert ports_of(spec) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"ports": {"http": 0}},
        {"ports": {"http": 65536}},
        {"ports": {"HTTP": 80}},
        {"ports": {f"p{i}": 80 for i in range(65)}},
        {"egress_mbps": 0},
        {"allow_from": ["../x"]},
        {"mode": "none"},
        {"port": 1},
    ],
)
def test_an_impossible_network_is_refused_at_admission(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, Network)
