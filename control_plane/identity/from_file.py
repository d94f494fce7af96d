"""The identity of a process that does not hold the authority's key: a credential in a file.

`twine-control-plane shard-credential` writes it on the authority's host, and again before it
expires; a running process reloads it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from control_plane.identity.own_credential import HeldCredential
from control_plane.identity.people import People
from control_plane.runtime.runtime import Runtime
from control_plane.store import KeyChange, Store
from control_plane.store.records import REVOKED
from wire import tls
from wire.errors import ConfigError, TwineError

log = logging.getLogger(__name__)
_CHECK_S = 30.0
"""Interval between two checks of the file."""


class FileIdentity(HeldCredential):
    """Serves the core, and calls agents, controllers and the core."""

    def __init__(self, path: Path, name: str) -> None:
        """Read the file; `ConfigError` if it is not the credential of this component."""
        self._path, self._name = path, name
        super().__init__(self._read())

    @property
    def cluster(self) -> str:
        """Return the trust domain."""
        return self._held.cluster

    def core_context(self) -> ssl.SSLContext:
        """Return a context to call the core."""
        return self._contexts.add(
            lambda held: tls.client_context(held, tls.CONTROL_PLANE), self._held
        )

    async def reload_forever(self) -> None:
        """Load each new credential of the file, forever."""
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                held = await asyncio.to_thread(self._read)
            except TwineError as e:
                log.warning("the credential cannot be read", extra={"reason": str(e)})
                continue
            if held != self._held:
                self._replace(held)
                log.info("new credential loaded", extra={"not_after": held.not_after})

    def _read(self) -> tls.Credential:
        held = tls.load(self._path)
        if held.name != self._name:
            raise ConfigError(
                f"{self._path} is the credential of {held.name}, not of {self._name}",
                hint="`twine-control-plane --help` names the command that writes it",
            )
        return held


class RevokedHosts:
    """The revoked identities, as the core writes them (`runtime.following`)."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self.people = People(store, runtime)
        self.is_followed = False

    def concerns(self, key: str) -> bool:
        """Return whether a key is about revocations."""
        return key.startswith(REVOKED)

    async def follow(self, _: KeyChange) -> None:
        """Read all revocations again: there are few."""
        await self.people.load()

    async def complete(self) -> None:
        """Do nothing: `follow` has read everything."""

    async def list_again(self) -> None:
        """Read all revocations again."""
        await self.people.load()
