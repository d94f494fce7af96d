"""One user opens two hundred connections to the local socket; a limit decides which ones stay.

A user has at most 192 connections there and 128 waiting requests (docs/security.md). The difference
is the reserve in which commands of the same user still get through.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from builders import FakeHost

from agent.client import AgentClient
from wire.errors import TwineError
from wire.limits import LOCAL

MANY = 200
WAITS_OF_ONE = 128
"""The limit of `wire.server` for one caller."""
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def crowd(host: FakeHost, path: str) -> AsyncIterator[list[Line]]:
    """Open `MANY` connections; each requests the given path, or nothing if it is empty."""
    lines: list[Line] = []
    try:
        for _ in range(MANY):
            reader, writer = await asyncio.open_unix_connection(host.config.socket)
            if path:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            lines.append((reader, writer))
        yield lines
    finally:
        for _, writer in lines:
            writer.close()


async def answered(line: Line) -> bool:
    """Return whether a connection is served when it sends a request now."""
    reader, writer = line
    try:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        return (await reader.read(12)) == b"HTTP/1.1 200"
    except ConnectionError:
        return False


async def test_too_many_idle_connections_close_the_oldest_and_serve_the_newest(
    host: FakeHost,
) -> None:
    async with host.agent() as client, crowd(host, "") as lines:
        assert (await client.readyz()).ok
        half = LOCAL.unproved_per_address // 2
        served = [await answered(line) for line in lines[-half:]]
        assert all(served), "the newest half stays"
        first = lines[: MANY - LOCAL.unproved_per_address]
        assert not any([await answered(line) for line in first])


async def latest(client: AgentClient) -> int:
    """Return the number of the last event, after the earlier waiting requests have ended."""
    while True:
        with suppress(TwineError):
            return (await client.get_events(0)).latest
        await asyncio.sleep(0.01)


async def test_a_user_at_its_limit_of_waits_can_still_send_commands(
    host: FakeHost,
) -> None:
    refused_count, quiet = MANY - WAITS_OF_ONE, False
    async with host.agent() as client, asyncio.timeout(120):
        while not quiet:  # an event of the host itself would answer the waiting requests
            after = await latest(client)
            async with crowd(host, f"/v1/events?wait_s=60&after={after}") as lines:
                waiting = [asyncio.ensure_future(reader.read(12)) for reader, _ in lines]
                while sum(task.done() for task in waiting) < refused_count:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=1)
                answers = Counter(task.result() for task in waiting if task.done())
                async with AgentClient(f"unix:{host.config.socket}") as another:
                    for _ in range(3):
                        assert (await another.readyz()).ok
                quiet = answers[b"HTTP/1.1 200"] == 0
                for task in waiting:
                    task.cancel()
    assert answers == {b"HTTP/1.1 503": refused_count}, (
        "answered that too many wait, and not closed"
    )
