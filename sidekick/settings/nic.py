"""Network interfaces: queues, rings, coalescing of interrupts, offloads.

They apply to every interface with a device, or to the named ones. A key that the driver lacks is
unsupported, and so is a number above its maximum; `"max"` means the maximum. Source: Linux,
Documentation/networking/ethtool-netlink.rst for the meaning of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from agent.machine import ethtool
from agent.machine.ethtool import SettingGroup, find_words, set_words
from sidekick.facts import nic_names
from sidekick.profile import Profile
from sidekick.report import Disruption, WantedSetting
from sidekick.setting import Host
from sidekick.settings.leading import LeadingSetting

Count = Annotated[int, Meta(ge=1, le=65536)] | Literal["max"]
Micros = Annotated[int, Meta(ge=0, le=1_000_000)]
Switch = Literal["on", "off"]

WORDS: dict[str, tuple[SettingGroup, int]] = {
    "queues": (ethtool.CHANNELS, 7),
    "rx_ring": (ethtool.RINGS, 4),
    "tx_ring": (ethtool.RINGS, 7),
    "rx_usecs": (ethtool.COALESCING, 0),
    "rx_frames": (ethtool.COALESCING, 1),
    "tx_usecs": (ethtool.COALESCING, 4),
    "tx_frames": (ethtool.COALESCING, 5),
}
MAXIMA = {"queues": 3, "rx_ring": 0, "tx_ring": 3}
"""Index in the same structure of the largest value that the driver accepts."""
NOTF_COAL = 53
"""Bit of a virtio device that delays notifications (include/uapi/linux/virtio_net.h)."""
VIRTIO_MAXIMA = {"rx_usecs": 0, "tx_usecs": 0, "rx_frames": 1, "tx_frames": 1}
"""What virtio_net accepts without that bit; its structure has the fields in any case."""
SWITCHES: dict[str, tuple[SettingGroup, int, int]] = {
    "adaptive_rx": (ethtool.COALESCING, 9, 1),
    "adaptive_tx": (ethtool.COALESCING, 10, 1),
    "rx_checksum": (ethtool.RX_CHECKSUM, 0, 1),
    "tx_checksum": (ethtool.TX_CHECKSUM, 0, 1),
    "scatter_gather": (ethtool.SCATTER_GATHER, 0, 1),
    "tso": (ethtool.TSO, 0, 1),
    "gso": (ethtool.GSO, 0, 1),
    "gro": (ethtool.GRO, 0, 1),
    "lro": (ethtool.FLAGS, 0, 1 << 15),
    "rxhash": (ethtool.FLAGS, 0, 1 << 28),
}
"""The structure, the word and the bit or bits of a switch."""
FOLLOWERS = {
    "tx_checksum": ("scatter_gather", "tso", "gso"),
    "scatter_gather": ("tso", "gso"),
    "rx_checksum": ("gro", "lro"),
}
"""Keys that the kernel switches off together with a key (net/core/dev.c, netdev_fix_features)."""


class Nic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [nic] table."""

    interfaces: list[Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,15}\Z")]] = []
    """Empty for all with a device behind them."""
    queues: Count | None = None
    """Pairs of receive and transmit queues ("combined channels")."""
    rx_ring: Count | None = None
    tx_ring: Count | None = None
    rx_usecs: Micros | None = None
    """How long the first packet may wait for an interrupt."""
    tx_usecs: Micros | None = None
    rx_frames: Annotated[int, Meta(ge=0, le=65536)] | None = None
    """How many packets may wait for one."""
    tx_frames: Annotated[int, Meta(ge=0, le=65536)] | None = None
    adaptive_rx: Switch | None = None
    """Whether the driver chooses those by the load."""
    adaptive_tx: Switch | None = None
    rx_checksum: Switch | None = None
    tx_checksum: Switch | None = None
    scatter_gather: Switch | None = None
    tso: Switch | None = None
    gso: Switch | None = None
    gro: Switch | None = None
    lro: Switch | None = None
    rxhash: Switch | None = None
    required: bool = False
    """Whether a host whose interfaces lack one of these cannot run the profile."""


class NicSetting(LeadingSetting):
    """One value for each interface and key: `nic.eth0.rx_ring`."""

    kind: ClassVar[str] = "nic"
    section: ClassVar[type[Nic]] = Nic

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:
        """Return the values for the interfaces of this host."""
        table: Nic = profile.sections[self.kind]
        given = msgspec.structs.asdict(table)
        return [
            self.value_of(profile, key, value, name)
            for nic in table.interfaces or nic_names(host.fs)
            for key in (*WORDS, *SWITCHES)
            if given[key] is not None
            for name, value in _resolve(host, nic, key, given[key])
        ]

    def needs(self, setting: str) -> Disruption:
        """Return DRAIN for queues and rings: many drivers take the link down to change them."""
        return Disruption.DRAIN if _parse_name(setting)[1] in MAXIMA else Disruption.LIVE

    def partners(self, setting: str) -> tuple[str, ...]:
        """Return the settings of the same interface that change with it."""
        nic, key, _ = _parse_name(setting)
        return tuple(f"nic.{nic}.{other}" for other in FOLLOWERS.get(key, ()))

    def rank(self, setting: str) -> int:
        """Return its place in the order of writes: leaders first, in the order of `FOLLOWERS`."""
        key = _parse_name(setting)[1]
        return [*FOLLOWERS].index(key) if key in FOLLOWERS else len(FOLLOWERS)

    def why_missing(self, setting: str) -> str:
        """Return why an interface cannot have it."""
        nic, key, excess = _parse_name(setting)
        if excess:
            return f"{excess} is more than the driver of {nic} takes for {key}"
        return f"there is no interface {nic}, or its driver has no {key} that can be set"

    def device(self, host: Host, setting: str) -> str:
        """Return the index of the interface, which the kernel gives only once."""
        return host.fs.find(f"/sys/class/net/{_parse_name(setting)[0]}/ifindex") or ""

    def read(self, host: Host, setting: str) -> str | None:
        """Return the value in force."""
        nic, key, excess = _parse_name(setting)
        if excess:
            return None
        group, word, bits = SWITCHES.get(key) or (*WORDS[key], 0)
        words = find_words(host.fs, nic, group)
        if words is None or (key in MAXIMA and not words[MAXIMA[key]]):
            return None
        if bits:
            return "on" if words[word] & bits else "off"
        return str(words[word])

    def write(self, host: Host, setting: str, value: str) -> None:
        """Set one field of the structure; the others keep the values that were read."""
        nic, key, _ = _parse_name(setting)
        group, word, bits = SWITCHES.get(key) or (*WORDS[key], 0)
        words = find_words(host.fs, nic, group) or [0] * group.words
        if bits:
            words[word] = words[word] | bits if value == "on" else words[word] & ~bits
        else:
            words[word] = int(value)
        set_words(host.fs, nic, group, words)


def _resolve(host: Host, nic: str, key: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the wanted name and value: "max" as a number; a name that marks too large a number."""
    name = f"nic.{nic}.{key}"
    maximum = _maximum(host, nic, key)
    if value == "max":
        yield name, str(maximum or 0)
    elif maximum is not None and isinstance(value, int) and value > maximum:
        yield f"{name}:{value}", str(value)
    else:
        yield name, str(value)


def _maximum(host: Host, nic: str, key: str) -> int | None:
    """Return the maximum of a driver for a key, None if the driver does not report it."""
    if key in MAXIMA:
        words = find_words(host.fs, nic, WORDS[key][0])
        return words[MAXIMA[key]] or None if words else None
    features = host.fs.find(f"/sys/class/net/{nic}/device/features") or ""
    if key in VIRTIO_MAXIMA and set(features) == {"0", "1"} and features[NOTF_COAL:][:1] != "1":
        return VIRTIO_MAXIMA[key]
    return None


def _parse_name(setting: str) -> tuple[str, str, str]:
    """Return interface, key, and a number that is too large; names of interfaces may have dots."""
    name, _, excess = setting.removeprefix("nic.").partition(":")
    nic, _, key = name.rpartition(".")
    return nic, key, excess
