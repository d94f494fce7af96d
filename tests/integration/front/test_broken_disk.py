"""The control plane on a small real disk that is full, or that accepts no more writes."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from .test_daemon import START_S, Daemon

pytestmark = pytest.mark.root


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB, on a device whose space others can take."""
    device, folder = tmp_path / "device", tmp_path / "disk"
    device.mkdir()
    folder.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=60m", "none", str(device))
    try:
        with (device / "image").open("wb") as file:
            file.truncate(16 << 20)
        run("mkfs.ext4", "-q", "-m", "0", "-E", "nodiscard", str(device / "image"))
        run("mount", "-o", "loop,errors=remount-ro", str(device / "image"), str(folder))
        try:
            yield folder
        finally:
            run("umount", str(folder))
    finally:
        run("umount", str(device))


def run(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, timeout=60, text=True).stdout


@pytest.fixture
def daemon(disk: Path) -> Iterator[Daemon]:
    running = Daemon(disk)
    try:
        running.wait_ready()
        yield running
    finally:
        running.process.kill()
        running.wait()


class Client:
    """A front end as a program sees it: status, headers, body."""

    def __init__(self, daemon: Daemon) -> None:
        self._connector = aiohttp.UnixConnector(str(daemon.socket))

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession("http://localhost", connector=self._connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def put(self, name: str) -> aiohttp.ClientResponse:
        """Request an entitlement that the portal stores as a request, with or without machines."""
        body = {"spec": {"machines": 1}, "queue": True, "reason": "x" * 900}
        return await self._session.post(f"/v1/entitlements/{name}/requests", json=body)

    async def names(self) -> set[str]:
        answer = await self._session.get("/v1/entitlement-requests")
        assert answer.status == 200
        return {request["entitlement"] for request in (await answer.json())["requests"]}

    async def is_ready(self) -> bool:
        return (await self._session.get("/readyz")).status == 200


def fill(folder: Path) -> Path:
    """Use all space of the disk."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


async def refused(client: Client) -> str:
    """Send requests until one is refused, as one must be; return the name in that request."""
    for number in range(1000):
        answer = await client.put(f"more-{number}")
        if answer.status == 503:
            assert answer.headers["Retry-After"]
            assert (await answer.json())["retryable"]
            return f"more-{number}"
        assert answer.status < 300, await answer.text()
    raise AssertionError("a full disk took a thousand writes")


@pytest.mark.behaviour("F-46")
def test_a_full_disk_refuses_writes_and_recovers_without_help(daemon: Daemon, disk: Path) -> None:
    """Writes get 503 and Retry-After, reads continue, and the process lives; then there is space
    again.
    """

    async def main() -> None:
        async with asyncio.timeout(START_S), Client(daemon) as client:
            assert (await client.put("first")).status < 300
            filler = fill(disk)
            lost = await refused(client)
            known = await client.names()
            assert "first" in known
            assert lost not in known
            assert await client.is_ready()
            assert daemon.process.poll() is None
            filler.unlink()
            while (answer := await client.put(lost)).status == 503:
                await asyncio.sleep(0.05)
            assert answer.status < 300
            assert await client.names() == known | {lost}

    asyncio.run(main())
    code, output = daemon.end()
    assert (code, "Traceback" in output) == (0, False)


@pytest.mark.behaviour("F-46")
def test_a_full_disk_ends_no_process(daemon: Daemon, disk: Path) -> None:
    """The kernel makes the file system read-only; stored data can still be read."""

    async def main() -> None:
        async with asyncio.timeout(START_S), Client(daemon) as client:
            assert (await client.put("first")).status < 300
            filler = fill(disk.with_name("device"))
            lost = await refused(client)
            assert "first" in await client.names()
            assert (await client.put(lost)).status == 503
            assert daemon.process.poll() is None
            filler.unlink()

    asyncio.run(main())
