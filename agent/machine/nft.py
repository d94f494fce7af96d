"""The kernel's packet filter: replaces a whole table in one transaction (pyroute2)."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable
from typing import Any

from pyroute2.netlink import NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_REQUEST
from pyroute2.netlink.nfnetlink import NFNL_SUBSYS_NFTABLES, nfgen_msg
from pyroute2.netlink.nfnetlink.nftsocket import (
    NFT_MSG_DELTABLE,
    NFT_MSG_GETRULE,
    NFT_MSG_NEWCHAIN,
    NFT_MSG_NEWRULE,
    NFT_MSG_NEWTABLE,
    AsyncNFTSocket,
    nft_chain_msg,
    nft_rule_msg,
    nft_table_msg,
)

from agent.netplan import Chain, Match, Rule

CGROUPS = "/sys/fs/cgroup"
_INET = 1
"""NFPROTO_INET: rules for both versions of IP."""
_BEGIN, _COMMIT = 0x10, 0x11
_HOOKS = {"input": 1, "forward": 2, "output": 3, "postrouting": 4}
_IIFNAME, _OIFNAME, _NFPROTO, _L4PROTO = 6, 7, 15, 16
_EQ, _NEQ = 0, 1
_NAME_SIZE = 16
_VERDICTS = {"drop": 0, "accept": 1}
_ESTABLISHED_OR_RELATED = 6
_ADDRESSES = {
    "ip saddr": (4, 12),
    "ip daddr": (4, 16),
    "ip6 saddr": (6, 8),
    "ip6 daddr": (6, 24),
}
"""IP version, and the offset of the address in the header."""
_SOCKET_CGROUP = 3

# pyroute2 0.9 lacks cgroups here (include/uapi/linux/netfilter/nf_tables.h, NFTA_SOCKET_LEVEL).
_SOCKET = nft_rule_msg.nft_expr.nft_socket
_SOCKET.nla_map = (*_SOCKET.nla_map[:3], ("NFTA_SOCKET_LEVEL", "be32"))
_SOCKET.socket_keys.ops = {**_SOCKET.socket_keys.ops, _SOCKET_CGROUP: "NFT_SOCKET_CGROUPV2"}


async def replace_table(name: str, chains: Iterable[Chain]) -> int:
    """Replace the table of that name; return the number of its rules.

    Either the whole table comes into force or nothing changes.
    """
    chains = list(chains)
    messages = [_edge(_BEGIN)]
    messages += [_message(nft_table_msg, NFT_MSG_NEWTABLE, [("NFTA_TABLE_NAME", name)])]
    messages += [_message(nft_table_msg, NFT_MSG_DELTABLE, [("NFTA_TABLE_NAME", name)])]
    messages += [_message(nft_table_msg, NFT_MSG_NEWTABLE, [("NFTA_TABLE_NAME", name)])]
    for chain in chains:
        messages.append(_chain(name, chain))
        messages += [_rule(name, chain.name, rule) for rule in chain.rules]
    async with AsyncNFTSocket(nfgen_family=_INET) as nft:
        async for _ in nft.nlm_request_batch([*messages, _edge(_COMMIT)]):
            pass
        rules = [rule async for rule in await nft.request_get(nfgen_msg(), NFT_MSG_GETRULE)]
    return sum(rule.get_attr("NFTA_RULE_TABLE") == name for rule in rules)


def _edge(kind: int) -> Any:
    message = nfgen_msg()
    message["res_id"] = NFNL_SUBSYS_NFTABLES
    message["header"]["type"] = kind
    message["header"]["flags"] = NLM_F_REQUEST
    return message


def _message(kind: type, command: int, attributes: list[tuple[str, Any]]) -> Any:
    message = kind()
    message["attrs"] = attributes
    message["header"]["type"] = NFNL_SUBSYS_NFTABLES << 8 | command
    message["header"]["flags"] = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_APPEND
    message["nfgen_family"] = _INET
    return message


def _chain(table: str, chain: Chain) -> Any:
    hook = [("NFTA_HOOK_HOOKNUM", _HOOKS[chain.hook]), ("NFTA_HOOK_PRIORITY", chain.priority)]
    attributes: list[tuple[str, Any]] = [
        ("NFTA_CHAIN_TABLE", table),
        ("NFTA_CHAIN_NAME", chain.name),
        ("NFTA_CHAIN_HOOK", {"attrs": hook}),
        ("NFTA_CHAIN_TYPE", chain.kind),
    ]
    return _message(nft_chain_msg, NFT_MSG_NEWCHAIN, attributes)


def _rule(table: str, chain: str, rule: Rule) -> Any:
    expressions = [e for match in rule.matches for e in _expressions(match)]
    expressions += _verdict(rule.verdict)
    attributes: list[tuple[str, Any]] = [
        ("NFTA_RULE_TABLE", table),
        ("NFTA_RULE_CHAIN", chain),
        ("NFTA_RULE_EXPRESSIONS", expressions),
    ]
    return _message(nft_rule_msg, NFT_MSG_NEWRULE, attributes)


def _expressions(match: Match) -> list[Any]:
    what, _, at = match.what.partition("@")
    operator = _NEQ if match.negated else _EQ
    value = match.value
    if what in ("iifname", "oifname"):
        key = _IIFNAME if what == "iifname" else _OIFNAME
        return [_meta(key), _compare(operator, _name(str(value)))]
    if what in _ADDRESSES:
        return _address(what, operator, value, int(at or 0))
    if what == "tcp dport":
        port = struct.pack(">H", int(value))
        return [
            _meta(_L4PROTO),
            _compare(_EQ, b"\x06"),
            _payload(2, 2, 2),
            _compare(operator, port),
        ]
    if what == "ct state":
        load = _expression("ct", ct_dreg=1, ct_key=0)
        mask = struct.pack("=I", _ESTABLISHED_OR_RELATED)
        return [load, _masked(mask), _compare(_NEQ, bytes(4))]
    if what == "cgroup":
        load = _expression("socket", socket_key=_SOCKET_CGROUP, socket_dreg=1, socket_level=1)
        number = os.stat(f"{CGROUPS}/{value!s}").st_ino
        return [load, _compare(operator, struct.pack("=Q", number))]
    raise ValueError(f"unknown match: {match.what}")


def _address(what: str, operator: int, value: str | int | bytes, at: int) -> list[Any]:
    version, offset = _ADDRESSES[what]
    family = [_meta(_NFPROTO), _compare(_EQ, b"\x02" if version == 4 else b"\x0a")]
    if isinstance(value, bytes):
        return [*family, _payload(1, offset + at, len(value)), _compare(operator, value)]
    network = ipaddress.ip_network(str(value))
    size = -(-network.prefixlen // 8)
    mask, wanted = network.netmask.packed[:size], network.network_address.packed[:size]
    masked = [_masked(mask)] if network.prefixlen % 8 else []
    return [*family, _payload(1, offset, size), *masked, _compare(operator, wanted)]


def _verdict(verdict: str) -> list[Any]:
    if verdict == "masquerade":
        return [_expression("masq")]
    if verdict == "reject":
        return [_expression("reject", reject_type=2, reject_icmp_code=3)]
    code = {"attrs": [("NFTA_VERDICT_CODE", _VERDICTS[verdict])]}
    data = {"attrs": [("NFTA_DATA_VERDICT", code)]}
    return [_expression("immediate", immediate_dreg=0, immediate_data=data)]


def _name(name: str) -> bytes:
    """Return a link's name in the form that the kernel compares; `*` at the end makes a prefix."""
    if name.endswith("*"):
        return name[:-1].encode()
    return name.encode().ljust(_NAME_SIZE, b"\0")


def _meta(key: int) -> Any:
    return _expression("meta", meta_dreg=1, meta_key=key)


def _payload(base: int, offset: int, size: int) -> Any:
    return _expression(
        "payload", payload_dreg=1, payload_base=base, payload_offset=offset, payload_len=size
    )


def _masked(mask: bytes) -> Any:
    value, zero = _data(mask), _data(bytes(len(mask)))
    return _expression(
        "bitwise",
        bitwise_sreg=1,
        bitwise_dreg=1,
        bitwise_len=len(mask),
        bitwise_mask=value,
        bitwise_xor=zero,
    )


def _compare(operator: int, value: bytes) -> Any:
    return _expression("cmp", cmp_sreg=1, cmp_op=operator, cmp_data=_data(value))


def _data(value: bytes) -> Any:
    return {"attrs": [("NFTA_DATA_VALUE", value)]}


def _expression(name: str, **attributes: Any) -> Any:
    inner = [(f"NFTA_{key.upper()}", value) for key, value in attributes.items()]
    return {"attrs": [("NFTA_EXPR_NAME", name), ("NFTA_EXPR_DATA", {"attrs": inner})]}
