"""Configuration of the agent, read once from /etc/twine/agent.toml and agent.toml.d/."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from agent.api.network import DnsName, IpAddress
from wire.errors import ConfigError
from wire.quantity_fields import TEXT_ENCODING, parse_quantities
from wire.toml_limits import parse_toml
from wire.violations import violations

DEFAULT_PATH = Path("/etc/twine/agent.toml")


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the operator. Every field has a default that suits a lab and a fleet."""

    state_dir: str = "/var/lib/twine"
    """Images, task roots, journal, identity. Must be on btrfs."""
    run_dir: str = "/run/twine"
    """Lock and socket; gone after a reboot."""
    socket: str = "/run/twine/agent.sock"
    """Local API, for root and the group below."""
    socket_group: str = "twine"
    listen: str = "0.0.0.0:7443"
    """Address of the API with mutual TLS; used once the host has joined, never without TLS."""
    sidekick: str = "/opt/twine/bin/sidekick"
    sidekick_state_dir: str = "/var/lib/twine/sidekick"
    reserve_memory_bytes: Annotated[int, Meta(ge=0)] = 128 << 20
    """Memory that tasks may not be promised: the kernel, systemd and the agent need it."""
    registry_tls_verify: bool = True
    """Whether a registry must prove its identity; false also allows plain HTTP."""
    registry_credentials_file: str = ""
    """Names and passwords in the format of containers-auth.json(5); readable for root alone."""
    image_keep_s: Annotated[float, Meta(ge=0)] = 7 * 86_400.0
    """How long an image stays that no task uses."""
    image_free_bytes: Annotated[int, Meta(ge=0)] = 512 << 20
    """When less is free, images that were unused for an hour are removed, longest unused first."""
    crash_points: bool = False
    """For tests: `TWINE_CRASHPOINT=name` ends the agent at that point. Never on a host in use."""
    own_init: bool = True
    """Whether tasks may have an init of their own, if the host has systemd-nspawn
    (docs/agent.md)."""
    network_prefix6: Annotated[str, Meta(max_length=64)] = "fd74:7769::/32"
    """Prefix of all private addresses of the region, the same on every host: a /32 of your own
    (RFC 4193). The prefix of a host adds the 32 bits of its IPv4 address (docs/network.md)."""
    network_prefix4: Annotated[str, Meta(max_length=32)] = "100.64.0.0/10"
    """Prefix of the tasks' IPv4 addresses on each host; they are not visible outside the host."""
    network_address: Annotated[str, Meta(max_length=15)] = ""
    """IPv4 address by which other hosts reach this one; empty: that of its default route."""
    dns_servers: Annotated[list[IpAddress], Meta(max_length=3)] = []
    """Name servers of tasks instead of the host's, for instance the region's resolver
    (docs/network.md). A task's own `network.dns` takes precedence."""
    dns_search: Annotated[list[DnsName], Meta(max_length=32)] = []
    """Search domains of tasks instead of the host's, for instance `twine.internal`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def address(self) -> tuple[str, int]:
        """Return host and port of `listen`."""
        host, _, port = self.listen.rpartition(":")
        if not host or not is_port(port) or int(port) > 65535:
            raise ConfigError(
                f"listen = {self.listen!r} is not HOST:PORT", hint="for instance 0.0.0.0:7443"
            )
        return host.strip("[]"), int(port)

    def dns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the name servers and the search domains of tasks; empty: those of the host."""
        return tuple(self.dns_servers), tuple(self.dns_search)

    def check_network(self) -> None:
        """Raise `ConfigError` for name servers, prefixes or an address that cannot be used."""
        for server in self.dns_servers:
            try:
                ipaddress.ip_address(server)
            except ValueError as e:
                raise ConfigError(f"dns_servers: {e}") from e
        for name, length, kind in (
            ("network_prefix6", 32, ipaddress.IPv6Network),
            ("network_prefix4", 24, ipaddress.IPv4Network),
        ):
            text = getattr(self, name)
            try:
                network = kind(text)
            except ValueError as e:
                raise ConfigError(f"{name} = {text!r} is not a network: {e}") from e
            if network.prefixlen > length or (length == 32 and network.prefixlen != length):
                word = "exactly" if length == 32 else "at most"
                raise ConfigError(f"{name} = {text!r}: its prefix length must be {word} /{length}")
        try:
            ipaddress.IPv4Address(self.network_address or "127.0.0.1")
        except ValueError as e:
            raise ConfigError(f"network_address = {self.network_address!r}: {e}") from e


def is_port(text: str) -> bool:
    """Return whether a text can be the number of a port; its range is not checked.

    `str.isdigit` is also true for digits such as `²`, which `int` refuses.
    """
    return re.fullmatch("[0-9]{1,18}", text) is not None


@dataclass(frozen=True, slots=True)
class ConfigSources:
    """The configuration in force, and the file of each field that is not a default."""

    config: AgentConfig
    origins: Mapping[str, Path]


def load(path: Path | None) -> AgentConfig:
    """Return the configuration; the defaults if there is no file at the default path."""
    return load_with_origins(path).config


def load_with_origins(path: Path | None) -> ConfigSources:
    """Return the configuration from a file and its drop-ins.

    Drop-ins of `agent.toml` are `agent.toml.d/*.toml`, in the order of their names. Each replaces
    whole fields of the files before it. Raises `ConfigError` with every wrong field and its file.
    """
    chosen = path or DEFAULT_PATH
    document: dict[str, Any] = {}
    origins: dict[str, Path] = {}
    for file in (chosen, *drop_ins(chosen)):
        read = _read(file, needed=path is not None and file == chosen)
        document |= read
        origins |= dict.fromkeys(read, file)
    if errors := violations(document, AgentConfig):
        listed = "; ".join(
            f"{e.field}: {e.reason} (in {origins.get(_top(e.field), chosen)})" for e in errors
        )
        raise ConfigError(
            f"{chosen} cannot be used: {listed}",
            hint="`twine-agent config` prints every field",
            errors=tuple(errors),
        )
    config = msgspec.convert(document, AgentConfig)
    config.address()
    config.check_network()
    return ConfigSources(config, origins)


def drop_ins(path: Path) -> list[Path]:
    """Return the drop-in files of a configuration file, in the order in which they are read."""
    return sorted(path.with_name(path.name + ".d").glob("*.toml"))


def _read(file: Path, *, needed: bool) -> dict[str, Any]:
    try:
        values = parse_quantities(parse_toml(file.read_text(TEXT_ENCODING)), AgentConfig)
    except FileNotFoundError as e:
        if not needed:
            return {}
        raise ConfigError(f"cannot read {file}: no such file") from e
    except OSError as e:
        raise ConfigError(f"cannot read {file}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"{file} is not text: {e.reason} at byte {e.start}") from e
    except ValueError as e:
        raise ConfigError(f"{file} is not TOML: {e}") from e
    assert isinstance(values, dict)
    return values


def _top(field: str) -> str:
    """Return the top-level field of a path into the configuration."""
    return re.split(r"[.\[]", field)[0]


def local_socket(config: AgentConfig) -> str:
    """Return the endpoint that the command line tool talks to."""
    return os.environ.get("TWINE_AGENT", f"unix:{config.socket}")
