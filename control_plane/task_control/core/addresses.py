"""The addresses to which the control plane may connect on behalf of a job (F-82).

The rules apply to the address after name resolution: only then the meaning of a name, a number or
a mapped address is known.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from wire.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_SPECIAL = (
    ipaddress.IPv4Network("0.0.0.0/8"),
    ipaddress.IPv4Network("192.0.0.0/24"),
    ipaddress.IPv6Network("fec0::/10"),
)
"""This network, protocol assignments, and the old site-local addresses: none is of a server."""


@dataclass(frozen=True, slots=True)
class AddressRules:
    """Which addresses may be connected to."""

    networks: tuple[Network, ...] = ()
    """Only these, if there are any; a listed network may even be loopback."""
    own: frozenset[Address] = frozenset()
    """The control plane's own addresses."""

    def refusal(self, text: str) -> str:
        """Return why an address is refused, as a predicate; empty: it is allowed."""
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return "is not an address"
        address = embedded_ipv4(address)
        if self.networks:
            is_listed = any(address in n for n in self.networks if n.version == address.version)
            return "" if is_listed else "is not in `controller_networks`"
        for applies, reason in (
            (address.is_loopback, "is this host's loopback"),
            (address in self.own, "is the control plane's own"),
            (address.is_link_local, "is link-local"),
            (address.is_multicast, "is multicast"),
            (address.is_unspecified or address.is_reserved or _is_special(address), "is reserved"),
        ):
            if applies:
                return reason
        return ""


def embedded_ipv4(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address embeds, or the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def address_rules(networks: Iterable[str], own: Collection[str]) -> AddressRules:
    """Return the rules of a configuration; names among `own` are ignored."""
    try:
        known = tuple(ipaddress.ip_network(text) for text in networks)
    except ValueError as e:
        raise ConfigError(
            f"controller_networks: {e}", hint="for instance 10.0.0.0/8 or fd00::/8"
        ) from e
    return AddressRules(known, frozenset(_addresses(own)))


def _addresses(texts: Iterable[str]) -> Iterable[Address]:
    for text in texts:
        try:
            yield embedded_ipv4(ipaddress.ip_address(text))
        except ValueError:
            continue


def _is_special(address: Address) -> bool:
    return any(address in n for n in _SPECIAL if n.version == address.version)
