"""The authority's file is missing or unusable: a new one is made only on request (docs/adr/0108).

Hosts trust the lost root. A new one would lock all of them out, even if the file is only not
mounted yet.
"""

from __future__ import annotations

import logging
from pathlib import Path

from control_plane.identity.rotation import TRUST
from control_plane.identity.stored import delete_all
from control_plane.store import Store
from wire import durable
from wire.errors import ConfigError

log = logging.getLogger(__name__)

OLD_FILE = "authority.pem.lost"


async def refuse_if_lost(store: Store, path: Path) -> None:
    """Raise `ConfigError` if the authority's file is missing and hosts have joined it."""
    if path.exists():
        return
    if hosts := await _joined_hosts(store):
        raise ConfigError(
            f"the authority is missing: {path} does not exist, and {len(hosts)} hosts trust it",
            hint="restore the file from a backup; if there is no backup: twine-control-plane "
            "new-authority, then let each host join again (docs/security.md)",
        )


async def drop_authority(store: Store, path: Path) -> list[str]:
    """Make the next start create a new authority; return the hosts that have to join again.

    The rest of the old file is kept next to it.
    """
    hosts = await _joined_hosts(store)
    if path.exists():
        path.replace(path.with_name(OLD_FILE))
        durable.sync_folder(path.parent)
    await delete_all(store, [TRUST + host for host in hosts])
    log.warning("authority replaced", extra={"hosts": len(hosts)})
    return hosts


async def _joined_hosts(store: Store) -> list[str]:
    entries = (await store.list_prefix(TRUST)).entries
    return [entry.key.removeprefix(TRUST) for entry in entries]
