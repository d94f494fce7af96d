"""Opens the main store of a configuration: SQLite in the state folder, or etcd."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

import msgspec

from agent.api.term import HEADER, Term
from control_plane.config import Config
from control_plane.store.protocol import Put, Store
from control_plane.store.sqlite import SqliteStore
from wire.errors import Busy, ConfigError


def main_store(
    config: Config,
    standing_by: Callable[[str], None] = lambda _leader: None,
    role: str = "",
    announce: Callable[[int], Sequence[Put]] = lambda _epoch: (),
) -> Store:
    """Return the main store, not open yet; `standing_by` is called with the name of the leader.

    In etcd each `role` has a leader, whose election writes what `announce(epoch)` returns.

    Raises `ConfigError` where etcd is configured and its libraries are missing.
    """
    if not config.etcd.endpoints:
        return SqliteStore(config.store_path)
    try:
        from control_plane.store.etcd import EtcdStore
    except ImportError as e:
        raise ConfigError(f"cannot use etcd: {e}", hint="pip install 'twine-cluster[etcd]'") from e
    return EtcdStore(config.etcd, standing_by=standing_by, role=role, announce=announce)


async def check_no_shard_leads(store: Store) -> None:
    """Raise `Busy` if shard processes lead while this process wants all roles."""
    leaders = getattr(store, "leaders", None)
    if leaders is not None:  # an engine of several processes
        others = {role: who for role, who in (await leaders()).items() if role}
        if others:
            listed = ", ".join(f"{role} ({who})" for role, who in sorted(others.items()))
            raise Busy(
                f"cannot run all roles in this process: {listed} lead",
                hint="stop the processes of shards first, or run this one with --role core",
            )


def stopped_store(config: Config) -> Store:
    """Return the main store for a command that runs while the control plane is stopped.

    It never waits for a leader. Raises `ConfigError` if there is no store.
    """
    if not config.etcd.endpoints and not config.store_path.exists():
        raise ConfigError(f"there is no store in {config.state}", hint="pass --state or --config")
    etcd = msgspec.structs.replace(config.etcd, standby=False)
    return main_store(msgspec.structs.replace(config, etcd=etcd))


def sqlite_only(config: Config, command: str) -> None:
    """Raise `ConfigError` for a command that copies SQLite's file if the store is in etcd."""
    if config.etcd.endpoints:
        raise ConfigError(
            f"{command} copies SQLite's file, and the store is in etcd",
            hint="etcdctl snapshot save, etcdctl snapshot restore (docs/scale.md)",
        )


class OwnTerm:
    """The term of this process; it begins with the newly opened store."""

    def __init__(self, store: Store) -> None:
        """Read the store's revision before this process writes anything."""
        self._store, self._name, self._began = store, secrets.token_hex(8), store.revision()

    def headers(self) -> Mapping[str, str]:
        """Return the term header of a request; reads only a number in memory."""
        return {HEADER: Term(self._name, self._began, self._store.revision()).text()}
