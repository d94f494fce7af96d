"""Answers that last: streams, and waits for news. Both end when the caller disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from aiohttp import web

from wire.connection import is_disconnected, on_disconnect

log = logging.getLogger(__name__)

READER_CHECK_S = 5.0
"""Seconds between checks for a reader that left, where no `HttpConnection` reports it. A silent
stream (a quiet log) outlives its reader by this time at most."""


class CallerLeft(Exception):
    """The caller of a request has gone."""


async def until_caller_leaves(request: web.Request, work: Awaitable[Any]) -> Any:
    """Return the result of a wait for news; raise `CallerLeft` once its caller has gone."""
    task = asyncio.current_task()
    assert task is not None
    with on_disconnect(request, task.cancel):
        try:
            return await work
        except asyncio.CancelledError:
            if not is_disconnected(request):
                raise
            task.uncancel()
            raise CallerLeft from None


async def answer_in_chunks(
    request: web.Request, chunks: AsyncIterator[bytes]
) -> web.StreamResponse:
    """Answer in chunks.

    A failure before the first chunk is answered with a problem document. A stream that breaks later
    ends without its end mark, so that the reader notices.
    """
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    try:
        async for chunk in _while_connected(request, chunks):
            if not response.prepared:
                await response.prepare(request)
            await response.write(chunk)
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof()
    except ConnectionError:
        log.debug("the reader of a stream left", extra={"path": request.path})
    except Exception as e:
        if not response.prepared:
            raise
        log.warning("a stream broke", extra={"path": request.path, "reason": str(e)})
        if request.transport is not None:
            request.transport.abort()
    return response


async def _while_connected(
    request: web.Request, chunks: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """Yield the chunks until the last one, or until the client is gone."""
    try:
        while True:
            waiting = asyncio.ensure_future(anext(chunks))
            try:
                with on_disconnect(request, waiting.cancel):
                    while not (await asyncio.wait({waiting}, timeout=READER_CHECK_S))[0]:
                        if is_disconnected(request):
                            return
                if waiting.cancelled() and is_disconnected(request):
                    return
                yield waiting.result()
            except StopAsyncIteration:
                return
            finally:
                await _cancelled(waiting)
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


async def _cancelled(future: asyncio.Future[bytes]) -> None:
    if not future.done():
        future.cancel()
        await asyncio.wait({future})
