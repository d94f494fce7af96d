"""Runs in a guest: answers on a unix socket, or sends a request there twice a second.

    socket_probe.py answer SOCKET
    socket_probe.py ask SOCKET FILE

Each request has its own connection. FILE gets one line for each answer: its latency in seconds.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time

PAUSE_S = 0.5
QUESTION = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


async def answer(path: str) -> None:
    """Answer with the least possible work, so that the latency is that of the machine."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(one, path) as server:
        await server.serve_forever()


def ask(path: str, file: str) -> None:
    """Send requests until terminated."""
    with open(file, "w") as out:
        while True:
            began = time.monotonic()
            with socket.socket(socket.AF_UNIX) as s:
                s.connect(path)
                s.sendall(QUESTION)
                received = s.recv(4096)
            assert b" 200 " in received, received
            print(f"{time.monotonic() - began:.3f}", file=out, flush=True)
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    if sys.argv[1] == "answer":
        asyncio.run(answer(sys.argv[2]))
    else:
        ask(*sys.argv[2:])
