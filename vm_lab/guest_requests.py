"""Carries out orders of a program outside the guest; answers when the agent has acknowledged them.

Each line of stdin is one request, each line of stdout one answer, in the order of completion. So
the caller has a record of every request, even if the guest stops in between.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from agent import api
from agent.client import AgentClient
from wire.errors import TwineError

SOCKET = "unix:/run/twine/agent.sock"
BUSYBOX = Path("/root/busybox")
SMALL_FILES = 100
"""Files in each image: a power cut damages metadata first."""
BIG_BYTES = 2 << 20
MEMORY_BYTES = 16 << 20


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A request: `task`, `no-task`, `image`, `no-image`, `look` or `fsck`."""

    number: int
    what: str
    name: str = ""
    """Id of the task; seed of the image."""
    generation: int = 0
    image: str = ""


class OrderResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an order."""

    number: int
    error: str = ""
    digest: str = ""
    tasks: dict[str, tuple[int, str]] = {}
    """Task id → generation and state."""
    images: list[str] = []
    wrong: list[str] = []
    """What fsck finds wrong."""


def image_of(seed: str) -> bytes:
    """Return the tar of an image, the same for the same seed."""
    chance, out = random.Random(seed), io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for folder in ("bin", "proc", "sys", "dev", "tmp", "run", "etc", "small"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        files = {"bin/busybox": BUSYBOX.read_bytes(), "big": chance.randbytes(BIG_BYTES)}
        files |= {f"small/{n}": chance.randbytes(200) for n in range(SMALL_FILES)}
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


async def _put_image(client: AgentClient, seed: str) -> str:
    data = image_of(seed)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 1 << 18):
            yield data[at : at + (1 << 18)]

    await client.put_image(digest, api.ImageFormat.TAR, chunks())
    return digest


async def _execute(client: AgentClient, order: Order) -> OrderResult:
    done = OrderResult(number=order.number)
    match order.what:
        case "task":
            spec = api.TaskSpec(
                generation=order.generation,
                image=order.image,
                command=["/bin/busybox", "sleep", "1000000"],
                environment={"GENERATION": str(order.generation)},
                limits=api.Limits(memory_max_bytes=MEMORY_BYTES),
                stop_timeout_s=2.0,
                offline_restart=True,
            )
            await client.put_task(order.name, spec)
        case "no-task":
            await client.delete_task(order.name, generation=order.generation)
        case "image":
            return msgspec.structs.replace(done, digest=await _put_image(client, order.name))
        case "no-image":
            await client.delete_image(order.image)
        case "fsck":
            accounts = (await client.get_accounts()).accounts
            wrong = [f"{a.kind} {a.name}: {a.why}" for a in accounts if a.wrong]
            return msgspec.structs.replace(done, wrong=wrong)
        case "look":
            tasks = (await client.list_tasks()).tasks
            images = (await client.list_images()).images
            return msgspec.structs.replace(
                done,
                tasks={t.task_id: (t.generation, str(t.state)) for t in tasks},
                images=sorted(i.digest for i in images),
            )
    return done


async def _answer(client: AgentClient, order: Order) -> None:
    try:
        done = await _execute(client, order)
    except TwineError as e:
        done = OrderResult(number=order.number, error=f"{e.code}: {e}")
    sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")
    sys.stdout.buffer.flush()


async def serve() -> None:
    """Carry out orders until the caller is gone."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with AgentClient(SOCKET) as client, asyncio.TaskGroup() as group:
        while line := await lines.readline():
            group.create_task(_answer(client, msgspec.json.decode(line, type=Order)))


if __name__ == "__main__":
    asyncio.run(serve())
