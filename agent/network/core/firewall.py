"""The firewall of a host as values: one table, replaced as a whole (docs/network.md).

A rule is a list of matches and a verdict. `agent/machine/nft.py` encodes them for the kernel.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv6Network

from agent.netplan import TUNNEL, Chain, Match, Rule, Site, TaskNet
from agent.network.core.addresses import HASH_BITS, digest

TABLE = "twine"
TASK_LINKS = "tw*"
"""Every link that leads to tasks: their own links, and the tunnel to other hosts (`twine6`)."""
_LINK_LOCAL = ("169.254.0.0/16", "fe80::/10")
_HASH_BYTES = HASH_BITS // 8
_JOB_AT, _TASK_AT = 8, 8 + _HASH_BYTES
"""Offsets of the two hashes in an address (agent/network/core/addresses.py)."""


def table(site: Site, nets: Collection[TaskNet]) -> list[Chain]:
    """Return the whole table for these private networks."""
    agent = Match("tcp dport", site.agent_port)
    from_tasks, known = Match("iifname", TASK_LINKS), Match("ct state", "established")
    forward = [Rule((known,), "accept"), *(r for net in nets for r in _own_addresses(net))]
    forward += [Rule((from_tasks, _to(prefix)), "drop") for prefix in _LINK_LOCAL]
    forward += [Rule((from_tasks, agent), "reject")]
    forward += [rule for net in nets for rule in _allow_rules(site, net)]
    tunnel = Match("oifname", TUNNEL)
    forward += [Rule((Match("iifname", TUNNEL), tunnel), "drop")]
    forward += [Rule((tunnel,), "accept")]  # the receiving host filters
    forward += [Rule((Match("oifname", TASK_LINKS),), "drop")]
    return [
        Chain(
            "from-tasks",
            "input",
            "filter",
            0,
            (
                Rule((known,), "accept"),
                Rule((from_tasks, _to(_LINK_LOCAL[0])), "drop"),
                Rule((from_tasks, agent), "reject"),
            ),
        ),
        Chain("between-tasks", "forward", "filter", 0, tuple(forward)),
        Chain(
            "of-host-tasks",
            "output",
            "filter",
            0,
            (Rule((Match("cgroup", site.tasks_group), agent), "reject"),),
        ),
        Chain("to-others", "postrouting", "nat", 100, tuple(_masquerade_rules(site))),
    ]


def _to(prefix: str) -> Match:
    return Match("ip6 daddr" if ":" in prefix else "ip daddr", prefix)


def _own_addresses(net: TaskNet) -> list[Rule]:
    """Return rules that drop packets with another sender: permissions depend on the address."""
    link = Match("iifname", net.veth)
    return [
        Rule((link, Match("ip saddr", f"{net.address4}/32", negated=True)), "drop"),
        Rule((link, Match("ip6 saddr", f"{net.address6}/128", negated=True)), "drop"),
    ]


def _allow_rules(site: Site, net: TaskNet) -> list[Rule]:
    """Return rules that accept the tasks that may reach this one, from anywhere in the region."""
    to = _to(f"{net.address6}/128")
    region = Match("ip6 saddr", str(IPv6Network(site.prefix6)))
    return [
        Rule((to, region, Match(f"ip6 saddr@{at}", digest(name).to_bytes(_HASH_BYTES))), "accept")
        for name in sorted(set(net.allow_from))
        for at in (_JOB_AT, _TASK_AT)
    ]


def _masquerade_rules(site: Site) -> list[Rule]:
    """Return rules that give packets to other destinations than tasks the host's address."""
    elsewhere = Match("oifname", TASK_LINKS, negated=True)
    return [
        Rule((Match("ip saddr", site.prefix4), elsewhere), "masquerade"),
        Rule((Match("ip6 saddr", site.prefix6), elsewhere), "masquerade"),
    ]
