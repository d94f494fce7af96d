"""A relay to a registry; holds large responses while a given file exists.

`python held_relay.py FROM_PORT TO_PORT FILE` runs in the lab's network. Documents pass. A response
beyond `PASSES` bytes waits, and FILE.waits exists meanwhile. Ending the relay cuts every response
at its current position.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

ADDRESS = "10.77.0.1"
PASSES = 256 << 10
POLL_S = 0.05


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hold: Path) -> None:
    """Copy one direction of a connection until it ends."""
    carried = 0
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(64 << 10):
            carried += len(data)
            while carried > PASSES and hold.exists():
                hold.with_suffix(".waits").touch()
                await asyncio.sleep(POLL_S)
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def main(from_port: int, to_port: int, hold: Path) -> None:
    """Relay until the program is terminated."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(ADDRESS, to_port)
        try:
            await asyncio.gather(pump(reader, back, hold), pump(there, writer, hold))
        finally:
            for end in (writer, back):
                end.close()

    server = await asyncio.start_server(serve, ADDRESS, from_port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
