"""Streams of server-sent events: changes of the store, and the log of a task."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable

import msgspec
from aiohttp import web

TICK_S = 2.0
"""A page is notified of changes at most this often; it always shows "as of"."""
STREAM_S = 300.0
"""A stream ends after this long; the browser opens another."""
_BEAT = b": \n\n"
"""A comment. Only a failing write shows that the browser has disconnected."""


async def send_changes(
    response: web.StreamResponse, revision: Callable[[], int], check: Callable[[], None]
) -> None:
    """Send the newest revision each tick, until `check` raises.

    Each stream has its own phase; otherwise all would send at once after a pause of the loop.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    async with asyncio.timeout(STREAM_S):
        while True:
            check()
            await response.write(b"data: %d\n\n" % revision())
            await asyncio.sleep(TICK_S - (clock() - began) % TICK_S)


async def send_log(
    response: web.StreamResponse, chunks: AsyncIterator[bytes], check: Callable[[], None]
) -> None:
    """Send each chunk of a log as a JSON string, and a comment in each tick without one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    coming = asyncio.ensure_future(anext(chunks, None))
    try:
        async with asyncio.timeout(STREAM_S):
            while True:
                check()
                if not (await asyncio.wait({coming}, timeout=TICK_S))[0]:
                    await response.write(_BEAT)
                    continue
                if (chunk := coming.result()) is None:
                    return
                text = msgspec.json.encode(decoder.decode(chunk))
                await response.write(b"data: " + text + b"\n\n")
                coming = asyncio.ensure_future(anext(chunks, None))
    finally:
        coming.cancel()
        await asyncio.wait({coming})
