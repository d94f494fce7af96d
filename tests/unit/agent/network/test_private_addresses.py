"""Names alone determine the addresses of a task, and the callers that may reach it."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from builders import a_spec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.api import Network, NetworkMode
from agent.api.network import contradiction
from agent.netplan import Chain, Rule, Site
from agent.network.core.addresses import (
    address4,
    address6,
    alias_of,
    digest,
    gateway4,
    host6,
    host_prefix6,
    netns_of,
    plan,
    read_alias,
    veth_of,
)
from agent.network.core.firewall import table
from wire.errors import HostError

SITE = Site(prefix6="fd74:7769::/32", host4="10.77.0.11", prefix4="100.64.0.0/10", agent_port=7443)
PRIVATE = Network(mode=NetworkMode.PRIVATE)
IDS = st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")


@given(IDS, IDS, st.ip_addresses(v=4))
def test_an_address_names_its_region_host_job_and_task(
    task_id: str, job: str, host: IPv4Address
) -> None:
    site = Site(prefix6=SITE.prefix6, host4=str(host), prefix4=SITE.prefix4, agent_port=7443)
    packed = address6(site, task_id, job).packed

    assert packed[:4] == IPv6Network(SITE.prefix6).network_address.packed[:4]
    assert packed[4:8] == host.packed
    assert packed[8:12] == digest(job).to_bytes(4)
    assert packed[12:] == digest(task_id).to_bytes(4)
    assert IPv6Address(packed) in host_prefix6(site)
    assert len(veth_of(task_id)) <= 15


@given(st.lists(IDS, min_size=1, max_size=40, unique=True))
def test_tasks_of_a_host_have_an_ipv4_address_each_and_keep_it(names: list[str]) -> None:
    site = Site(prefix6=SITE.prefix6, host4="10.0.0.1", prefix4="10.9.0.0/26", agent_port=1)
    nets = []
    for name in names:
        nets.append(plan(site, name, a_spec(network=PRIVATE), nets))
    found = [IPv4Address(net.address4) for net in nets]

    assert len(set(found)) == len(found)
    assert all(a in IPv4Network(site.prefix4) and a != gateway4(site) for a in found)
    assert [plan(site, n.task_id, a_spec(network=PRIVATE), nets).address4 for n in nets] == [
        n.address4 for n in nets
    ]


def test_a_prefix_without_a_free_address_is_named() -> None:
    site = Site(prefix6=SITE.prefix6, host4="10.0.0.1", prefix4="10.9.0.0/30", agent_port=1)

    assert str(address4(site, "a", [])) == "10.9.0.2"
    with pytest.raises(HostError, match=r"no address of 10\.9\.0\.0/30 is free for task b"):
        address4(site, "b", ["10.9.0.2"])


def test_the_alias_of_a_link_is_enough_to_restore_the_network() -> None:
    net = plan(SITE, "web-0", a_spec(job="web", network=PRIVATE), [])
    read = read_alias(net.veth, alias_of(net))

    assert read is not None
    assert (read.task_id, read.address4, read.address6, read.namespace) == (
        "web-0",
        net.address4,
        net.address6,
        netns_of("web-0"),
    )
    assert len(alias_of(plan(SITE, "x" * 63, a_spec(), []))) < 256
    assert read_alias("eth0", "") is None
    assert read_alias("eth0", "an uplink of the operator") is None


def _rules(chain: str, *specs: tuple[str, Network]) -> tuple[Rule, ...]:
    nets = []
    for task_id, network in specs:
        nets.append(plan(SITE, task_id, a_spec(network=network), nets))
    return next(c.rules for c in table(SITE, nets) if c.name == chain)


def test_only_allowed_tasks_reach_a_private_task() -> None:
    rules = _rules(
        "between-tasks",
        ("web-0", Network(mode=NetworkMode.PRIVATE, allow_from=["db"])),
        ("other", PRIVATE),
    )
    let_in = [r for r in rules if r.verdict == "accept" and len(r.matches) > 1]

    assert {m.value for r in let_in for m in r.matches if "@" in m.what} == {
        digest("db").to_bytes(4)
    }
    assert rules[-1].verdict == "drop"
    assert [(m.what, m.value) for m in rules[-1].matches] == [("oifname", "tw*")]


@pytest.mark.behaviour("BUG-NT1")
def test_packets_to_another_host_are_filtered_there() -> None:
    """The tunnel's name has the same prefix as the links of tasks; all its packets were dropped."""
    rules = _rules("between-tasks", ("web-0", PRIVATE))
    verdicts = [
        r.verdict
        for r in rules
        if all(m.what == "oifname" and m.value in ("twine6", "tw*") for m in r.matches)
    ]
    assert verdicts == ["accept", "drop"]


def test_a_task_sends_from_its_own_addresses_only() -> None:
    rules = _rules("between-tasks", ("web-0", PRIVATE))
    own = [
        r
        for r in rules
        if any(m.what == "iifname" and m.value == veth_of("web-0") for m in r.matches)
    ]

    assert [r.verdict for r in own] == ["drop", "drop"]
    assert all(r.matches[1].negated for r in own)
    assert rules.index(own[0]) < next(
        i for i, r in enumerate(rules) if "daddr" in r.matches[-1].what
    )


def _as_text(chains: list[Chain]) -> str:
    lines = []
    for chain in chains:
        lines.append(f"{chain.name} ({chain.kind} {chain.hook} {chain.priority})")
        for rule in chain.rules:
            words = (f"{m.what} {'!= ' * m.negated}{m.value}" for m in rule.matches)
            lines.append(f"  {', '.join(words)}: {rule.verdict}")
    return "\n".join(lines) + "\n"


def test_no_task_reaches_the_agent_or_the_clouds_metadata() -> None:
    reported = _as_text(table(SITE, []))

    assert reported == (
        "from-tasks (filter input 0)\n"
        "  ct state established: accept\n"
        "  iifname tw*, ip daddr 169.254.0.0/16: drop\n"
        "  iifname tw*, tcp dport 7443: reject\n"
        "between-tasks (filter forward 0)\n"
        "  ct state established: accept\n"
        "  iifname tw*, ip daddr 169.254.0.0/16: drop\n"
        "  iifname tw*, ip6 daddr fe80::/10: drop\n"
        "  iifname tw*, tcp dport 7443: reject\n"
        "  iifname twine6, oifname twine6: drop\n"
        "  oifname twine6: accept\n"
        "  oifname tw*: drop\n"
        "of-host-tasks (filter output 0)\n"
        "  cgroup workload.slice, tcp dport 7443: reject\n"
        "to-others (nat postrouting 100)\n"
        "  ip saddr 100.64.0.0/10, oifname != tw*: masquerade\n"
        "  ip6 saddr fd74:7769::/32, oifname != tw*: masquerade\n"
    )


def test_a_network_option_that_needs_a_private_network_is_refused_without_one() -> None:
    assert contradiction(Network(egress_mbps=1)).startswith("network.egress_mbps needs a network")
    assert "allow_from" in contradiction(Network(allow_from=["a"]))
    assert contradiction(Network(mode=NetworkMode.PRIVATE, egress_mbps=1)) == ""


@pytest.mark.behaviour("BUG-AG58")
def test_a_rate_that_the_kernel_cannot_hold_is_refused() -> None:
    private = Network(mode=NetworkMode.PRIVATE, egress_mbps=34_359)
    assert contradiction(private) == ""
    assert contradiction(replace(private, egress_mbps=40_000)) == (
        "network.egress_mbps 40000 is above 34359, the maximum"
    )


def test_a_host_has_an_address_in_the_network_of_its_tasks() -> None:
    assert str(host6(SITE)) == "fd74:7769:a4d:b::1"
