"""The delivery service's configuration: one frozen value, read once from TOML."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Argument, Name
from control_plane.config import EtcdSettings
from control_plane.store import Store
from control_plane.store.sqlite import SqliteStore
from wire.config_file import listen_address, read_config
from wire.errors import ConfigError

DEFAULT_SOCKET = "/run/twine-conveyor/conveyor.sock"


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts that pipelines may bring to another release, and the commands for that."""

    install: Annotated[list[Argument], Meta(min_length=1, max_length=64)]
    """Command that puts release `$release` on host `$host`, run by this service. It may be run
    again with the same arguments, and must fail if the release does not start."""
    hosts: Annotated[list[Name], Meta(max_length=10_000)] = []
    """In the order in which they are changed: the first one is the canary. Empty: every machine
    of the region, by name."""
    probe: Annotated[list[Argument], Meta(max_length=64)] = []
    """Command that prints the release on `$host`, and fails if the host is not healthy. Empty: the
    control plane reports the agent's version, and whether the agent answers."""
    install_timeout_s: Annotated[float, Meta(ge=1, le=7200)] = 900.0
    """A command that runs for longer is ended and failed."""
    healthy_s: Annotated[float, Meta(ge=1, le=7200)] = 300.0
    """After its command a host may take this long to be healthy with the release."""
    settle_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """A host must be healthy for this long before the next one is changed."""
    max_unavailable: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """The largest number of hosts that may be unavailable at the end of a release."""


class ConveyorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file; every key has a default that works on one machine."""

    state: Annotated[str, Meta(min_length=1)] = "/var/lib/twine-conveyor"
    """Folder of its SQLite store, which one process at a time may open."""
    etcd: EtcdSettings = EtcdSettings(prefix="/twine-conveyor")
    """Store in etcd instead: several instances; one leads and the others stand by."""
    socket: Annotated[str, Meta(min_length=1)] = DEFAULT_SOCKET
    """Unix socket for `twinectl pipeline` as root on this host."""
    endpoint: str = ""
    """Front end; empty: the one in the credential, or its unix socket on this host."""
    credential: str = ""
    """File of a user credential (`twine-control-plane user add`) that may change the jobs."""
    listen: str = ""
    """`HOST:PORT` for users with TLS; empty: only the unix socket."""
    server_credential: str = ""
    """File of the certificate that it presents to users; needed for `listen`."""
    writers: Annotated[list[str], Meta(max_length=1000)] = []
    """Users who may apply, approve and control pipelines; others only read."""

    fleets: Annotated[dict[Name, FleetSettings], Meta(max_length=64)] = {}
    """Hosts by the name that pipelines use (`fleets`)."""

    def listen_on(self) -> tuple[str, int] | None:
        """Return host and port to listen on; None: TLS is not configured."""
        if not self.listen:
            return None
        address = listen_address(self.listen)
        if not self.server_credential:
            raise ConfigError("cannot listen with TLS: server_credential is missing")
        return address


def load(path: Path | None) -> ConveyorConfig:
    """Return the configuration of a TOML file, or raise `ConfigError` with all its errors."""
    if path is None:
        return ConveyorConfig()
    config = read_config(path, ConveyorConfig)
    config.listen_on()
    for name, fleet in config.fleets.items():
        if fleet.probe and not fleet.hosts:
            raise ConfigError(
                f"{path} is not valid: fleets.{name}.hosts is missing: probe needs it"
            )
        repeated = sorted(host for host, count in Counter(fleet.hosts).items() if count > 1)
        if repeated:
            raise ConfigError(
                f"{path} is not valid: fleets.{name}.hosts names twice: {', '.join(repeated)}"
            )
    return config


def open_store(config: ConveyorConfig) -> Store:
    """Return the store of a configuration, not open yet. The process that opens it leads: SQLite is
    locked by a file, etcd by a lease, and a second instance waits.
    """
    if not config.etcd.endpoints:
        return SqliteStore(Path(config.state))
    from control_plane.store.etcd import EtcdStore

    return EtcdStore(config.etcd)
