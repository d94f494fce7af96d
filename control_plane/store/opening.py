"""Which engine holds the main store of a configuration: SQLite in the state folder, or etcd."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from control_plane.config import Config
from control_plane.store.protocol import Store
from control_plane.store.sqlite import SqliteStore
from wire.errors import ConfigError


def main_store(config: Config, standing_by: Callable[[str], None] = lambda _leader: None) -> Store:
    """Return the main store, not open yet; `standing_by` is called with the name of the leader.

    Raises `ConfigError` where etcd is configured and its libraries are missing.
    """
    if not config.etcd.endpoints:
        return SqliteStore(config.store_path)
    try:
        from control_plane.store.etcd import EtcdStore
    except ImportError as e:
        raise ConfigError(f"cannot use etcd: {e}", hint="pip install 'twine-cluster[etcd]'") from e
    return EtcdStore(config.etcd, standing_by=standing_by)


def stopped_store(config: Config) -> Store:
    """Return the main store for a command that runs while the control plane is stopped.

    It never waits for a leader. Raises `ConfigError` if there is no store.
    """
    if not config.etcd.endpoints and not config.store_path.exists():
        raise ConfigError(f"there is no store in {config.state}", hint="pass --state or --config")
    etcd = msgspec.structs.replace(config.etcd, standby=False)
    return main_store(msgspec.structs.replace(config, etcd=etcd))


def sqlite_only(config: Config, command: str) -> None:
    """Raise `ConfigError` for a command that copies SQLite's file where the store is in etcd."""
    if config.etcd.endpoints:
        raise ConfigError(
            f"{command} copies SQLite's file, and the store is in etcd",
            hint="etcdctl snapshot save, etcdctl snapshot restore (docs/scale.md)",
        )
