"""The identity of a process that does not hold the authority's key: a credential in a file.

`twine-control-plane shard-credential` writes it on the authority's host, and again before it
expires; a running process reloads it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from control_plane.identity.people import People
from control_plane.runtime.runtime import Runtime
from control_plane.store import KeyChange, Store
from control_plane.store.records import REVOKED
from wire import tls
from wire.errors import ConfigError, Forbidden, TwineError
from wire.peers import peer_of, principal

log = logging.getLogger(__name__)
_LOOK_S = 30.0
"""Interval between two checks of the file."""


class FileIdentity:
    """Serves the core, and calls agents, controllers and the core."""

    def __init__(self, path: Path, name: str) -> None:
        """Read the file; `ConfigError` if it is not the credential of this component."""
        self._path, self._name = path, name
        self._contexts = tls.Followers()
        self._held = self._read()
        self.revoked: RevokedHosts | None = None

    @property
    def cluster(self) -> str:
        """Return the trust domain."""
        return self._held.cluster

    def server_context(self, *, require_client: bool = True) -> ssl.SSLContext:
        """Return a context to serve others of the cluster, or also callers without an identity."""
        return self._contexts.add(
            lambda held: tls.server_context(held, require_client=require_client), self._held
        )

    def agents_context(self) -> ssl.SSLContext:
        """Return one context to call all agents: each call names the agent in `tls.EXPECTED`."""
        return self._contexts.add(
            lambda held: tls.client_context(held, "", self._judge), self._held
        )

    def core_context(self) -> ssl.SSLContext:
        """Return a context to call the core."""
        return self._contexts.add(
            lambda held: tls.client_context(held, tls.CONTROL_PLANE), self._held
        )

    async def follow_forever(self) -> None:
        """Load each new credential of the file, for as long as the process runs."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                held = await asyncio.to_thread(self._read)
            except TwineError as e:
                log.warning("the credential cannot be read", extra={"reason": str(e)})
                continue
            if held != self._held:
                self._held = held
                self._contexts.take(held)
                log.info("new credential taken", extra={"not_after": held.not_after})

    def _read(self) -> tls.Credential:
        held = tls.load(self._path)
        if held.name != self._name:
            raise ConfigError(
                f"{self._path} is the credential of {held.name}, not of {self._name}",
                hint="`twine-control-plane --help` names the command that writes it",
            )
        return held

    def _judge(self, certificate: Mapping[str, Any]) -> None:
        """Refuse an agent whose identity was revoked."""
        peer = peer_of(certificate)
        if self.revoked is not None and self.revoked.people.is_void(peer.name, peer.valid_from):
            raise Forbidden(f"the identity of {principal(peer)} was revoked; it has to join again")


class RevokedHosts:
    """The revoked identities, as the core writes them (`runtime.following`)."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        """Read nothing yet."""
        self.people = People(store, runtime)
        self.is_followed = False

    def concerns(self, key: str) -> bool:
        """Return whether a key is about revocations."""
        return key.startswith(REVOKED)

    async def follow(self, _: KeyChange) -> None:
        """Read all again: there are few."""
        await self.people.load()

    async def complete(self) -> None:
        """Do nothing: all was read."""

    async def list_again(self) -> None:
        """Read all again."""
        await self.people.load()
