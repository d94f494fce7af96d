"""Passes a conversation, such as a terminal in a task, on to another process."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from wire.duplex import Duplex, Talk, join


async def passed_on(opened: AbstractAsyncContextManager[Duplex]) -> Talk:
    """Open a connection, and return the talk that joins its caller's with it.

    The caller's websocket reports later failures.
    """
    far = await opened.__aenter__()

    async def talk(near: Duplex) -> None:
        try:
            await join(near, far)
        finally:
            await opened.__aexit__(None, None, None)

    return talk
