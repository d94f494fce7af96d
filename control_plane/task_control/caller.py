"""One call of a controller, bounded in time, size and address.

No byte of a request is sent before the other end proved with its certificate that it is the
controller which the job names. Any other server at the address sees a failed handshake.
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
from control_plane.task_control.core.addresses import Rules
from taskcontrol.api import TaskControlRequest, TaskControlResponse
from taskcontrol.routes import PROCESS
from wire.client import Lane, WireClient
from wire.errors import Forbidden, ProtocolError, TwineError
from wire.tls import EXPECTED_SERVER

ANSWER_MAX_BYTES = 1 << 20
"""Ids of 30,000 operations."""
TIMEOUT_S = 5.0
"""For a whole call: name resolution, connection, handshake, request and answer."""


class ControllerCaller:
    """Calls controllers over mutual TLS."""

    def __init__(self, context: ssl.SSLContext, rules: Rules, timeout_s: float = TIMEOUT_S) -> None:
        """`context` is for calls to any service of this cluster."""
        self._context, self._rules, self._timeout_s = context, rules, timeout_s

    async def __call__(
        self, ref: ControllerRef, request: TaskControlRequest
    ) -> TaskControlResponse:
        """Return the answer; raises `TwineError` for anything else."""
        client = _OneCall(ref, self._context, self._rules, self._timeout_s)
        try:
            async with client:
                answer: TaskControlResponse = await client.call(PROCESS, request)
                return answer
        except TwineError:
            raise
        except (RecursionError, ValueError) as e:  # nested without end, no text, no number
            raise ProtocolError(f"{ref.url} sent an answer that is not a valid reply") from e


class _OneCall(WireClient):
    """A connection for one call, to an address that was checked."""

    max_answer_bytes = ANSWER_MAX_BYTES

    def __init__(
        self, ref: ControllerRef, tls: ssl.SSLContext, rules: Rules, timeout_s: float
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
                _judge(self._rules, host, host)
            connector = aiohttp.TCPConnector(
                ssl=self._tls or True, resolver=_Judging(self._rules), force_close=True, limit=1
            )
            session = self._sessions[lane] = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
            )
        return session


class _Judging(AbstractResolver):
    """Resolves names to allowed addresses; the connection goes to exactly these."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a name; `Forbidden` if any of them may not be called.

        It does not drop only the forbidden ones: a name with a mix of both is suspicious.
        """
        found = await self._resolver.resolve(host, port, family)
        for address in found:
            _judge(self._rules, host, address["host"])
        return found

    async def close(self) -> None:
        """Close the inner resolver."""
        await self._resolver.close()


def _judge(rules: Rules, host: str, address: str) -> None:
    why = rules.refusal(address)
    if why:
        which = host if host == address else f"{host} ({address})"
        raise Forbidden(
            f"a controller at {which} is not called: the address {why}",
            hint="an operator can list networks in `controller_networks` of the configuration",
        )
