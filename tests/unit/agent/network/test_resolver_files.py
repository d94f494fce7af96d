"""Programs of a task resolve names by the three files that each runtime makes."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from builders import a_spec
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Dns, Network, NetworkMode, Relaxation
from agent.api.network import contradiction
from agent.network.core.resolver_files import HostNames, Resolver, files_of, read_resolver
from agent.runtime.core.records import key_of

HOST = HostNames(
    name="m1",
    address="10.77.0.11",
    resolv_conf="# by dhcp\nnameserver 10.0.0.2\nsearch lab.example\noptions edns0\n",
    hosts="127.0.0.1 localhost\n127.0.1.1 m1\n10.77.0.12\tm2 # the next\n\n# no more\n",
)
STUB = HostNames(
    name="m1",
    resolv_conf="nameserver 127.0.0.53\noptions edns0 trust-ad\n",
    upstream="nameserver 169.254.169.253\nnameserver fe80::1%2\nnameserver 10.0.0.9\n",
)
REGION = Resolver(("10.0.0.53",), ("twine.internal",))
NOTHING = Resolver()
PRIVATE = ["fd74:7769::1", "100.64.0.1"]


def files(
    host: HostNames = HOST, region: Resolver = NOTHING, **network: Any
) -> dict[str, list[str]]:
    """Return the words of each line of a task's files, without comments."""
    spec = a_spec(network=Network(**network))
    addresses = PRIVATE if spec.network.mode is NetworkMode.PRIVATE else []
    found = files_of("web-0", spec, addresses, host, region)
    return {
        path: [" ".join(line.split()) for line in data.decode().splitlines() if line[0] != "#"]
        for path, data in found.items()
    }


@pytest.mark.behaviour("BUG-AG31")
def test_a_task_of_the_hosts_network_finds_names_as_its_host_does() -> None:
    found = files()
    assert found["etc/resolv.conf"] == [
        "nameserver 10.0.0.2",
        "search lab.example",
        "options edns0",
    ]
    assert found["etc/hostname"] == ["m1"]
    assert found["etc/hosts"] == [
        "127.0.0.1 localhost",
        "::1 localhost ip6-localhost ip6-loopback",
        "10.77.0.11 web-0 m1",
        "127.0.1.1 m1",
        "10.77.0.12 m2 # the next",
    ]


@pytest.mark.behaviour("BUG-AG31")
def test_a_task_of_its_own_network_knows_its_addresses_and_servers_it_reaches() -> None:
    """A server on a loopback or link-local address is not reachable from a namespace."""
    found = files(STUB, mode=NetworkMode.PRIVATE)
    assert found["etc/resolv.conf"] == ["nameserver 10.0.0.9", "options edns0 trust-ad"]
    assert found["etc/hosts"][2:] == ["fd74:7769::1 web-0 m1", "100.64.0.1 web-0 m1"]
    assert files(STUB)["etc/resolv.conf"][0] == "nameserver 127.0.0.53"


@pytest.mark.behaviour("BUG-AG31")
def test_a_tasks_own_keys_come_before_the_regions_and_those_before_the_hosts() -> None:
    """`web` resolves if the agent's configuration names the region's resolver."""
    assert files(region=REGION)["etc/resolv.conf"] == [
        "nameserver 10.0.0.53",
        "search twine.internal",
        "options edns0",
    ]
    own = Dns(
        servers=["127.0.0.1"], search=["a.b", "c"], options=["ndots:2"], hosts={"db": "10.1.1.1"}
    )
    found = files(region=REGION, dns=own)
    assert found["etc/resolv.conf"] == ["nameserver 127.0.0.1", "search a.b c", "options ndots:2"]
    assert "10.1.1.1 db" in found["etc/hosts"]


@pytest.mark.behaviour("BUG-AG31")
def test_a_system_container_has_its_own_host_name_and_a_comment_without_name_servers() -> None:
    own_init = a_spec(
        relaxations=[Relaxation.OWN_INIT], network=Network(mode=NetworkMode.PRIVATE), command=[]
    )
    found = files_of("shop", own_init, PRIVATE, HostNames(name="m1"), Resolver())
    assert found["etc/hostname"] == b"shop\n"
    assert b"# This task can reach no known name server" in found["etc/resolv.conf"]
    assert b"nameserver" not in found["etc/resolv.conf"]


@pytest.mark.behaviour("BUG-AG31")
@pytest.mark.parametrize("address", ["10.0.0", "::::", "1.2.3.4.5"])
def test_an_invalid_address_is_refused_by_name(address: str) -> None:
    assert address in contradiction(Network(dns=Dns(servers=[address])))
    assert address in contradiction(Network(dns=Dns(hosts={"db": address})))


@pytest.mark.behaviour("BUG-AG31")
def test_name_servers_are_part_of_what_runs_and_keys_of_others_stay() -> None:
    plain = a_spec(network=Network(ports={"http": 80}))
    assert key_of(plain) == "f08bd3e48fc5"
    named = a_spec(network=Network(ports={"http": 80}, dns=Dns(search=["a"])))
    assert key_of(named) != key_of(plain)


@pytest.mark.behaviour("BUG-AG31")
@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(NetworkMode))
def test_a_private_task_gets_reachable_name_servers_for_any_host_configuration(
    text: str, mode: NetworkMode
) -> None:
    host = HostNames(name="m1", resolv_conf=f"{STUB.resolv_conf}{text}\nnameserver 10.9.9.9")
    found = files_of("a", a_spec(network=Network(mode=mode)), [], host, Resolver())
    servers = read_resolver(found["etc/resolv.conf"].decode()).servers
    assert 1 <= len(servers) <= 3
    for server in servers:
        address = ipaddress.ip_address(server.partition("%")[0])
        assert mode is NetworkMode.HOST or not address.is_loopback
