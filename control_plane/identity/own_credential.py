"""A process's own credential: the contexts made of it follow each new one."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import Any

from wire import tls
from wire.errors import Forbidden
from wire.peers import peer_of, principal


class HeldCredential:
    """Serves others, and calls agents whose identity was not revoked."""

    def __init__(self, held: tls.Credential) -> None:
        self._held, self._contexts = held, tls.RenewedContexts()
        self.is_void: Callable[[str, float], bool] = lambda _name, _valid_from: False
        """Returns whether a certificate was revoked, by its name and start of validity."""

    def server_context(self, *, require_client: bool = False) -> ssl.SSLContext:
        """Return a context to serve others of the cluster, and also callers without an identity."""
        return self._contexts.add(
            lambda held: tls.server_context(held, require_client=require_client), self._held
        )

    def agents_context(self) -> ssl.SSLContext:
        """Return one context to call all agents; `tls.EXPECTED_SERVER` names the called agent."""
        return self._contexts.add(
            lambda held: tls.client_context(held, "", self._check_agent), self._held
        )

    def _replace(self, held: tls.Credential) -> None:
        """Use a new credential in every context; open connections stay."""
        self._held = held
        self._contexts.renew(held)

    def _check_agent(self, certificate: Mapping[str, Any]) -> None:
        """Refuse an agent whose identity was revoked."""
        peer = peer_of(certificate)
        if self.is_void(peer.name, peer.valid_from):
            raise Forbidden(f"the identity of {principal(peer)} was revoked; it has to join again")
