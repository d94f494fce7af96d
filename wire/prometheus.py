"""Client of a Prometheus server's HTTP API v1; every answer is checked.

Source: Prometheus documentation, "HTTP API": instant queries, range queries.
"""

from __future__ import annotations

from typing import Any, Self

import aiohttp
import msgspec

from wire.errors import Unreachable

TIMEOUT_S = 10.0
ANSWER_MAX = 4 << 20
"""Largest answer in bytes. A series of 11,000 points, Prometheus' maximum, has 300 KB."""


class PrometheusSeries(msgspec.Struct):
    """One series of an answer: `value` of an instant query, `values` of a range query."""

    metric: dict[str, str]
    value: tuple[float, str] | None = None
    """Seconds since 1970, and a number as text."""
    values: list[tuple[float, str]] = []


class PrometheusData(msgspec.Struct, rename={"result_type": "resultType"}):
    """The data of an answer; `result` by its type."""

    result_type: str = ""
    result: list[Any] = []

    def series(self, kind: str) -> list[PrometheusSeries]:
        """Return the series of a `vector` or a `matrix`. Raises `Unreachable` for another type."""
        if self.result_type not in (kind, ""):
            raise Unreachable(f"it answers with a {self.result_type[:50]}, not a {kind}")
        try:
            return msgspec.convert(self.result, list[PrometheusSeries], strict=False)
        except msgspec.ValidationError as e:
            raise Unreachable(f"its answer has no series: {e}") from e

    def scalar(self) -> str | None:
        """Return the number of a scalar as text, None for other types."""
        if self.result_type != "scalar" or len(self.result) != 2:
            return None
        return str(self.result[1])


class _Response(msgspec.Struct):
    status: str
    data: PrometheusData = msgspec.field(default_factory=PrometheusData)
    error: str = ""


class Prometheus:
    """One server. Its methods raise `Unreachable`; the text is a clause whose subject is "it"."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """`url` is the address of its web interface; no connection is made yet."""
        self._url = url.rstrip("/") + "/api/v1/"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        """Return itself; the first query connects."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self.close()

    async def close(self) -> None:
        """Close all connections; the next query makes others."""
        if self._session is not None:
            await self._session.close()

    async def query(self, promql: str) -> PrometheusData:
        """Return the present value of a query."""
        return await self._query("query", {"query": promql})

    async def query_range(
        self, promql: str, start: float, end: float, step_s: float
    ) -> PrometheusData:
        """Return the values of a query, in steps from `start` to `end` (seconds since 1970)."""
        times = {"start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step_s:g}"}
        return await self._query("query_range", {"query": promql, **times})

    async def _query(self, call: str, parameters: dict[str, str]) -> PrometheusData:
        status, body = await self._post(call, parameters)
        try:
            answer = msgspec.json.decode(body, type=_Response)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as e:
            raise Unreachable(f"its answer cannot be read (HTTP {status})") from e
        if answer.status != "success":
            raise Unreachable(f"it refuses the query: {answer.error[:300] or answer.status[:300]}")
        return answer.data

    async def _post(self, call: str, parameters: dict[str, str]) -> tuple[int, bytes]:
        session = self._session
        if session is None or session.closed:
            session = self._session = aiohttp.ClientSession(timeout=self._timeout)
        try:
            async with session.post(
                self._url + call, data=parameters, allow_redirects=False
            ) as response:
                body = bytearray()
                async for chunk in response.content.iter_chunked(1 << 16):
                    body += chunk
                    if len(body) > ANSWER_MAX:
                        raise Unreachable(f"its answer is over {ANSWER_MAX >> 20} MiB")
                return response.status, bytes(body)
        except TimeoutError as e:
            raise Unreachable(f"no answer within {self._timeout.total:g} s") from e
        except (aiohttp.ClientError, OSError, ValueError) as e:
            text = " ".join(str(e).split())[:300] or type(e).__name__
            raise Unreachable(f"it cannot be reached: {text}") from e
