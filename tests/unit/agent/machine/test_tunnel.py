"""The tunnel to private tasks of other hosts follows the address of its host."""

from __future__ import annotations

from typing import Any, Self

import pytest
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from agent.machine import netlink
from agent.netplan import TUNNEL

OWN, PREFIX, HOST6 = "10.77.0.11", "fd74:7769::/32", "fd74:7769:a4d:b::1"


class FakeRoutes:
    """Links, addresses and routes as netlink messages; it starts with loopback only."""

    def __init__(self) -> None:
        self.tunnels: list[dict[str, Any]] = []
        """All tunnels that were created, in order; the last one exists."""
        self.exists = False
        self.routes: list[str] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def link_lookup(self, ifname: str) -> list[int]:
        return [1] if ifname == "lo" else [2] if self.exists else []

    async def link(self, what: str, **fields: Any) -> list[ifinfmsg]:
        if what == "get":
            return [self._message()]
        if what == "add":
            self.tunnels.append(fields)
        self.exists = {"add": True, "del": False}.get(what, self.exists)
        return []

    async def addr(self, what: str, **fields: Any) -> None:
        del what, fields

    async def route(self, what: str, *, dst: str, oif: int) -> None:
        assert (what, oif, self.exists) == ("replace", 2, True)
        self.routes.append(dst)

    def _message(self) -> ifinfmsg:
        """Return the tunnel as the kernel encodes it."""
        made, message = self.tunnels[-1], ifinfmsg()
        data = [
            ("IFLA_SIT_LOCAL", made["sit_local"]),
            ("IFLA_SIT_TTL", made["sit_ttl"]),
            ("IFLA_SIT_6RD_PREFIX", made["sit_6rd_prefix"]),
            ("IFLA_SIT_6RD_PREFIXLEN", made["sit_6rd_prefixlen"]),
        ]
        info = [("IFLA_INFO_KIND", "sit"), ("IFLA_INFO_DATA", {"attrs": data})]
        message["attrs"] = [("IFLA_IFNAME", TUNNEL), ("IFLA_LINKINFO", {"attrs": info})]
        message.encode()
        found = ifinfmsg(message.data)
        found.decode()
        return found


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> FakeRoutes:
    found = FakeRoutes()
    monkeypatch.setattr(netlink, "AsyncIPRoute", lambda **_: found)
    monkeypatch.setattr(netlink, "_write_sysctl", lambda *_, **__: None)
    return found


@pytest.mark.behaviour("BUG-AG59")
async def test_a_tunnel_is_made_again_only_if_the_host_has_another_address(
    routes: FakeRoutes,
) -> None:
    """With the old local address the kernel refuses packets that other hosts send to the new."""
    for address in (OWN, OWN, "10.77.0.12", "10.77.0.12"):
        assert await netlink.ensure_host(address, HOST6, PREFIX) == ""
    await netlink.ensure_host("10.77.0.12", HOST6, "fd74:7770::/32")
    made = [(t["sit_local"], t["sit_6rd_prefix"]) for t in routes.tunnels]
    assert made == [
        (OWN, "fd74:7769::"),
        ("10.77.0.12", "fd74:7769::"),
        ("10.77.0.12", "fd74:7770::"),
    ]
    assert routes.routes == [PREFIX] * 4 + ["fd74:7770::/32"]
