"""Makes one call of a controller, bounded in time, size and address.

The other end must first prove with its certificate that it is the controller which the job names.
Any other server at the address sees a failed handshake, and no byte of a request.
"""

from __future__ import annotations

import socket
import ssl

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.helpers import is_ip_address
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from control_plane.api.jobs import ControllerRef
from control_plane.task_control.core.addresses import AddressRules
from taskcontrol.api import TaskControlRequest, TaskControlResponse
from taskcontrol.routes import PROCESS
from wire.client import Lane, WireClient
from wire.errors import Forbidden, ProtocolError, TwineError
from wire.tls import EXPECTED_SERVER

ANSWER_MAX_BYTES = 1 << 20
"""Enough for the ids of 30,000 operations."""
TIMEOUT_S = 5.0
"""For a whole call: name resolution, connection, handshake, request and answer."""


class ControllerCaller:
    """Calls controllers over mutual TLS."""

    def __init__(
        self, context: ssl.SSLContext, rules: AddressRules, timeout_s: float = TIMEOUT_S
    ) -> None:
        """`context` is valid for calls to any service of this cluster."""
        self._context, self._rules, self._timeout_s = context, rules, timeout_s

    async def __call__(
        self, ref: ControllerRef, request: TaskControlRequest
    ) -> TaskControlResponse:
        """Return the controller's answer, or raise `TwineError`."""
        client = _ControllerClient(ref, self._context, self._rules, self._timeout_s)
        try:
            async with client:
                answer: TaskControlResponse = await client.call(PROCESS, request)
                return answer
        except TwineError:
            raise
        except (RecursionError, ValueError) as e:  # nested without end, no text, no number
            raise ProtocolError(f"{ref.url} sent an answer that is not a valid reply") from e


class _ControllerClient(WireClient):
    """Makes one connection, to a checked address, for one call."""

    max_answer_bytes = ANSWER_MAX_BYTES

    def __init__(
        self, ref: ControllerRef, tls: ssl.SSLContext, rules: AddressRules, timeout_s: float
    ) -> None:
        super().__init__(ref.url, tls, timeout_s=timeout_s)
        self.expected = f"/controller/{ref.name}"
        self._rules = rules

    def _open(self, lane: Lane = Lane.COMMAND) -> aiohttp.ClientSession:
        EXPECTED_SERVER.set(self.expected)
        session = self._sessions.get(lane)
        if session is None:
            host = URL(self.endpoint).host or ""
            if is_ip_address(host):  # these bypass the resolver
                _check_address(self._rules, host, host)
            connector = aiohttp.TCPConnector(
                ssl=self._tls or True,
                resolver=_CheckingResolver(self._rules),
                force_close=True,
                limit=1,
            )
            session = self._sessions[lane] = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
            )
        return session


class _CheckingResolver(AbstractResolver):
    """Resolves names and checks the addresses; the connection uses exactly these addresses."""

    def __init__(self, rules: AddressRules) -> None:
        self._rules = rules
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a name; `Forbidden` if any of them may not be called.

        A name with permitted and forbidden addresses is suspicious, so it is refused as a whole.
        """
        addresses = await self._resolver.resolve(host, port, family)
        for address in addresses:
            _check_address(self._rules, host, address["host"])
        return addresses

    async def close(self) -> None:
        """Close the inner resolver."""
        await self._resolver.close()


def _check_address(rules: AddressRules, host: str, address: str) -> None:
    """Raise `Forbidden` if an address of a host may not be called."""
    why = rules.refusal(address)
    if why:
        which = host if host == address else f"{host} ({address})"
        raise Forbidden(
            f"a controller at {which} is not called: the address {why}",
            hint="an operator can list networks in `controller_networks` of the configuration",
        )
