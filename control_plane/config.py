"""The control plane's configuration: one frozen value, read once by the daemon.

Everything has a default that works on one machine; a TOML file overrides it, and options of
the command line override the file. All errors of a file are reported at once.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from agent.api import Name
from agent.api.ranges import END
from control_plane.api.people import Principal
from control_plane.api.settings import PortalSettings, SchedulerSettings
from wire.config_file import config_of, listen_address, read_toml
from wire.errors import ConfigError, FieldError, InvalidInput
from wire.units import seconds
from wire.violations import violations

_SECONDS = re.compile(r"\d{1,9}(?:\.\d{1,9})?")
Folder = Annotated[str, Meta(pattern=r"^[^\x00]+$", description="the name of a folder")]
EtcdUrl = Annotated[
    str,
    Meta(
        pattern=r"^https?://[^/]+:\d+" + END, description="a client URL such as https://etcd1:2379"
    ),
]
EtcdPrefix = Annotated[
    str,
    Meta(
        pattern=r"^[!-~]+" + END,
        max_length=200,
        description="1 to 200 printable ASCII characters without blanks",
    ),
]
_WILDCARDS = ("", "0.0.0.0", "::")


class EtcdSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An etcd cluster as the main store. One control plane leads; the others stand by."""

    endpoints: list[EtcdUrl] = []
    """Client URLs of its members, as `https://etcd1:2379`. Empty: SQLite in `state`."""
    prefix: EtcdPrefix = "/twine"
    """All keys are below it, so that several regions can share a cluster."""
    ca: str = ""
    """File of the authority that signed the members' certificates; needed for `https`."""
    certificate: str = ""
    """File of this client's certificate; empty: none."""
    key: str = ""
    """File of its key."""
    ttl_s: Annotated[int, Meta(ge=2, le=60)] = 4
    """Seconds after which another control plane takes over from a silent one."""
    standby: bool = True
    """Wait while another control plane leads, and take over from it; false: end with 75."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of an operator."""

    state: str = "/var/lib/twine-control-plane"
    """Folder of the store, the authority and the images."""
    listen: str = "0.0.0.0:7440"
    """`HOST:PORT` for agents and users, always with TLS; port 0 takes any free one."""
    advertise: list[str] = []
    """Addresses and DNS names at which hosts and users reach it; they get into its
    certificate, and the first one into join tokens. Empty: `listen`, or this host's name."""
    socket: str = "/run/twine/control-plane.sock"
    """Unix socket for the command line on this host; each user that may open it is an operator."""
    socket_group: str = ""
    """Group that may use the socket, in addition to root and the daemon's own user."""
    cluster: Name = "twine"
    """Trust domain of all certificates; it cannot be changed later."""
    leaf_life_s: Annotated[float, Meta(ge=300, le=90 * 86_400)] = 45 * 86_400.0
    """Life of certificates of hosts, which renew them each day: a host that is away longer has to
    join again. The minimum leaves time to renew."""
    task_leaf_life_s: Annotated[float, Meta(ge=600, le=7 * 86_400)] = 86_400.0
    """Life of certificates of tasks, renewed after a tenth of it. They cannot be revoked, so a
    stolen one is valid for this long, and the control plane may be away for this long."""
    image_max_bytes: Annotated[int, Meta(ge=1)] = 16 << 30
    """Largest image that may be pushed."""
    images_of_owner_max_bytes: Annotated[int, Meta(ge=1)] = 256 << 30
    """Bytes of all images of one user, operators excepted, so that no user fills the disk."""
    broker_stores: dict[Name, Folder] = {}
    """Data center → folder of the store of its machines; other data centers use `state`."""
    etcd: EtcdSettings = EtcdSettings()
    role: Literal["all", "core", "shard", "front-end"] = "all"
    """The role of this process: the whole control plane; all of it except shards from 1 on; one of
    these shards; or a front end that calls a core. `core` and `shard` need `etcd` and a fixed port
    (docs/scale.md)."""
    shard: Annotated[int, Meta(ge=0, le=63)] = 0
    """Number of the shard of a process with `role = "shard"`, from 1 on."""
    shard_credential: str = ""
    """File with the credential of that process: `twine-control-plane shard-credential`."""
    front_end_credential: str = ""
    """File with the credential of a front end: `twine-control-plane front-end-credential`."""
    cores: list[str] = []
    """With `role = "front-end"`: URLs of possible cores; the leading one answers."""
    operators: list[Principal] = []
    """Users and groups who may do everything, such as `user:ann` and `group:sre`; besides them the
    users granted that role by `twinectl role grant`, and each user that may open `socket`."""
    audit_entries: Annotated[int, Meta(ge=1000, le=10_000_000)] = 100_000
    """Entries of the audit log that are kept, some 300 bytes each."""
    controller_networks: list[str] = []
    """Networks in which TaskControllers may be, as `10.0.0.0/8`: only there, even on loopback if it
    is listed. Empty: anywhere but on loopback, link-local, multicast, reserved, own addresses."""
    web: Literal["full", "read-only", "off"] = "full"
    """The web console at `/ui/`: with forms, without them, or not at all."""
    autoscaler: str = "/run/twine/autoscaler.sock"
    """Socket of `twine-autoscaler` on this host, for the console; empty: not shown."""
    conveyor: Annotated[
        str,
        Meta(
            pattern=r"^(unix:/.+|https://.+)?" + END,
            description="unix:/PATH, https://HOST:PORT, or empty",
        ),
    ] = "unix:/run/twine-conveyor/conveyor.sock"
    """Delivery service for the console: `unix:/PATH` or `https://HOST:PORT`; empty: not shown."""
    conveyor_credential: str = ""
    """File of a user credential (`twine-control-plane user add`), for `conveyor` over `https`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    scheduler: SchedulerSettings = SchedulerSettings()
    portal: PortalSettings = PortalSettings()

    @property
    def state_path(self) -> Path:
        """Return the state folder."""
        return Path(self.state)

    @property
    def store_path(self) -> Path:
        """Return the folder of the main store."""
        return self.state_path / "store"

    @property
    def authority_path(self) -> Path:
        """Return the file of the authority's key and certificate."""
        return self.state_path / "authority.pem"

    def listen_on(self) -> tuple[str, int]:
        """Return host and port to listen on, or raise `ConfigError`."""
        return listen_address(self.listen)

    def reachable_at(self) -> list[str]:
        """Return the names and addresses of the certificate, the best one first."""
        host, _ = self.listen_on()
        own = socket.gethostname().lower() if host in _WILDCARDS else host
        return list(dict.fromkeys([*self.advertise, own, "localhost", "127.0.0.1", "::1"]))


def load(path: Path | None, overrides: dict[str, Any]) -> Config:
    """Return the configuration of a file (None: no file); `overrides` replace its values."""
    document = {} if path is None else read_toml(path)
    document |= {k: v for k, v in overrides.items() if v not in (None, (), [])}
    relations = (_folder_errors, _etcd_errors, _role_errors, _scope_errors)
    return config_of(document, Config, "the configuration", relations)


def _folder_errors(document: dict[str, Any]) -> list[FieldError]:
    """Return errors in the folders of data centers' stores: each needs a separate one.

    Values that are no folder names are skipped: the check of types reports them.
    """
    stores, state = document.get("broker_stores"), document.get("state", Config().state)
    if not isinstance(stores, dict) or not isinstance(state, str) or "\0" in state:
        return []
    taken = {os.path.realpath(Config(state=state).store_path): "the main store"}
    errors = []
    for name, folder in stores.items():
        if not isinstance(folder, str) or not folder or "\0" in folder:
            continue
        reason, real = "", os.path.realpath(folder)
        if not os.path.isabs(folder):
            reason = f"{folder!r} is not an absolute path"
        else:
            overlapping = [other for path, other in taken.items() if _overlap(real, path)]
            if overlapping:
                other = overlapping[0]
                reason = f"{folder!r} is the folder of {other}, or one of them lies in the other"
            else:
                taken[real] = str(name)
        if reason:
            errors.append(FieldError(field=f"broker_stores.{name}", reason=reason))
    return errors


def _etcd_errors(document: dict[str, Any]) -> list[FieldError]:
    """Return errors in the etcd settings: missing ones, and contradictions."""
    etcd = document.get("etcd")
    if not isinstance(etcd, dict) or not etcd.get("endpoints"):
        return []
    found = []
    urls = [url for url in etcd["endpoints"] if isinstance(url, str)]
    if any(url.startswith("https:") for url in urls) and not etcd.get("ca"):
        found.append(FieldError(field="etcd.ca", reason="https endpoints need a file here"))
    if bool(etcd.get("certificate")) != bool(etcd.get("key")):
        found.append(FieldError(field="etcd.key", reason="certificate and key go together"))
    if document.get("broker_stores"):
        reason = "folders of one host, which a standby on another cannot read: leave it empty"
        found.append(FieldError(field="broker_stores", reason=reason))
    return found


def _role_errors(document: dict[str, Any]) -> list[FieldError]:
    """Return the settings that contradict the role of the process."""
    role, shard = document.get("role", "all"), document.get("shard", 0)
    if role == "front-end":
        return _front_end_errors(document)
    if role not in ("core", "shard"):
        return []
    found, etcd, listen = [], document.get("etcd"), str(document.get("listen", ""))
    if not (isinstance(etcd, dict) and etcd.get("endpoints")):
        reason = f"the processes of a region share a store: role {role} needs an etcd cluster"
        found.append(FieldError(field="etcd.endpoints", reason=reason))
    if listen.endswith(":0"):
        reason = f"other processes call the port of role {role}, so it must be fixed: not 0"
        found.append(FieldError(field="listen", reason=reason))
    if role == "shard" and not document.get("shard_credential"):
        reason = "a shard needs the file that `twine-control-plane shard-credential` wrote"
        found.append(FieldError(field="shard_credential", reason=reason))
    if role == "shard" and shard == 0:
        reason = "shard 0 runs in the core: other processes have 1 and above"
        found.append(FieldError(field="shard", reason=reason))
    return found


def _front_end_errors(document: dict[str, Any]) -> list[FieldError]:
    found = []
    if not document.get("front_end_credential"):
        reason = "needs the file that `twine-control-plane front-end-credential` wrote"
        found.append(FieldError(field="front_end_credential", reason=reason))
    cores = document.get("cores")
    if not isinstance(cores, list) or not all(str(url).startswith("https://") for url in cores):
        cores = []
    if not cores:
        reason = "a front end needs the https:// URL of each core"
        found.append(FieldError(field="cores", reason=reason))
    return found


def _scope_errors(document: dict[str, Any]) -> list[FieldError]:
    """Return errors for regions of unknown shards; processes may start shards later."""
    scheduler = document.get("scheduler")
    if document.get("role", "all") != "all" or not isinstance(scheduler, dict):
        return []
    regions, count = scheduler.get("shard_regions"), scheduler.get("shards", 1)
    if not isinstance(regions, dict) or not isinstance(count, int):
        return []
    reason = f"there is no such shard: shards = {count}, and they begin at 0"
    later = sorted(n for n in map(str, regions) if n.isdecimal() and int(n) >= count)
    return [FieldError(field=f"scheduler.shard_regions.{n}", reason=reason) for n in later]


def _overlap(one: str, other: str) -> bool:
    return os.path.commonpath((one, other)) in (one, other)


def with_down_after(config: Config, text: str) -> Config:
    """Return the configuration with another `down_after_s`: `30s`, or seconds.

    Agents answer a waiting request in less than that, because the answer is the sign of life.
    """
    try:
        down_after_s = float(text) if _SECONDS.fullmatch(text) else seconds(text)
    except InvalidInput as e:
        raise ConfigError(f"--down-after: {e}") from e
    poll_wait_s = min(config.scheduler.poll_wait_s, down_after_s / 2)
    changed = {"down_after_s": down_after_s, "poll_wait_s": poll_wait_s}
    if found := violations(changed, SchedulerSettings):
        raise ConfigError(f"--down-after {text}: {found[0].reason}")
    scheduler = msgspec.structs.replace(config.scheduler, **changed)
    return msgspec.structs.replace(config, scheduler=scheduler)
