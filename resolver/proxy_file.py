"""Keeps a proxy's configuration up to date: writes the file, checks it, reloads the proxy."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from control_plane.api.endpoints import Endpoints
from resolver.endpoint_follower import EndpointFollower
from resolver.proxies import Known, ProxiedService, Render, is_host
from resolver.zone import ip_version
from wire.errors import Busy, HostError, ProgramError, TwineError

log = logging.getLogger(__name__)

FILE = "{file}"
"""Placeholder in a command for the path of the file to check."""
PROGRAM_S = 60.0
SETTLE_S = 0.1
"""Changes within this time are written together, because each reload starts a new process of the
proxy. Much shorter than a job's `update.drain_s`, the limit for removing a task from the proxy."""
_REFRESH_S = 60.0
_RETRY_S = 2.0
_RESOLVE_S = 5.0
"""Longest wait for DNS before a file is written; the names are looked up at once."""
_TAIL_BYTES = 1 << 16
"""How much of a program's output is kept: the capacity of a pipe."""


class ProxyFile:
    """One file of a proxy, with the commands that check it and reload the proxy."""

    def __init__(self, path: Path, check: Sequence[str], reload: Sequence[str]) -> None:
        """An empty command means that there is none."""
        self.path = path
        self._check = check
        self._reload = reload
        self._loaded_text: str | None = None
        """The text of the last reload that succeeded; None before the first."""

    async def update(self, text: str) -> bool:
        """Make the proxy use this text; return whether it was reloaded.

        A text that the check refuses is never written to the file. A failed reload is repeated at
        the next call, also by a process that starts after this one was killed.
        """
        if text == self._loaded_text:
            return False
        new = self.path.with_name(f".{self.path.name}.new")
        try:
            _write(new, text)
            if self._check:
                await run_program([word.replace(FILE, str(new)) for word in self._check])
            new.replace(self.path)
        except OSError as e:
            raise HostError(f"cannot write {self.path}: {e.strerror or e}") from e
        finally:
            with suppress(OSError):
                new.unlink(missing_ok=True)
        if self._reload:
            await run_program(self._reload)
        self._loaded_text = text
        return True


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


async def usable_endpoints(
    follower: EndpointFollower, services: Sequence[ProxiedService], wait_s: float
) -> Known:
    """Return the usable addresses of all services; raises `Busy` while one is unknown."""
    jobs = sorted({s.job for s in services})
    found = await asyncio.gather(*(follower.get(job, wait_s) for job in jobs))
    hosts = {endpoint.host for e in found if e is not None for endpoint in e.endpoints}
    reasons = await asyncio.gather(*map(_why_unusable, hosts))
    unusable = {host: why for host, why in zip(hosts, reasons, strict=True) if why}
    return {job: _without_unusable(e, unusable) for job, e in zip(jobs, found, strict=True)}


async def _why_unusable(host: str) -> str:
    """Return why no proxy can use a host; empty if it is usable.

    HAProxy and nginx refuse a whole file with one name that does not exist. After any other failure
    of DNS, or without an answer, a name stays: otherwise the failure would empty the file.
    """
    if not is_host(host):
        return "it is not a host"
    if ip_version(host):
        return ""
    try:
        async with asyncio.timeout(_RESOLVE_S):
            await asyncio.get_running_loop().getaddrinfo(host, None)
    except UnicodeError:
        return "DNS cannot hold this name"
    except OSError as e:
        is_missing = e.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
        return f"no address: {e.strerror}" if is_missing else ""
    return ""


def _without_unusable(found: Endpoints | None, unusable: Mapping[str, str]) -> Endpoints | None:
    """Return the addresses without the unusable ones, which are logged."""
    if found is None:
        return None
    for endpoint in found.endpoints:
        if why := unusable.get(endpoint.host):
            extra = {"task": endpoint.task, "host": endpoint.host, "why": why}
            log.warning("a task is left out: no proxy can use its host", extra=extra)
    return replace(found, endpoints=[e for e in found.endpoints if e.host not in unusable])


async def keep_up_to_date(
    follower: EndpointFollower,
    changed: asyncio.Event,
    services: Sequence[ProxiedService],
    render: Render,
    file: ProxyFile,
) -> None:
    """Keep a file in line with discovery until cancelled; `changed` is set at each change.

    Nothing is written before all services are known: a serving proxy is never emptied because
    the control plane is unreachable.
    """
    while True:
        changed.clear()
        try:
            known = await usable_endpoints(follower, services, _REFRESH_S)
            if await file.update(render(services, known)):
                log.info("the proxy got new addresses of jobs", extra=_counts(known))
        except Busy as e:
            log.warning("waiting for the control plane", extra={"why": str(e)})
            await asyncio.sleep(_RETRY_S)
            continue
        except TwineError as e:
            log.error("the proxy could not be updated", extra={"why": str(e)})
            await asyncio.sleep(_RETRY_S)
            continue
        with suppress(TimeoutError):
            async with asyncio.timeout(_REFRESH_S):
                await changed.wait()
        await asyncio.sleep(SETTLE_S)


def _counts(known: Known) -> dict[str, object]:
    return {job: "no such job" if e is None else len(e.endpoints) for job, e in known.items()}


async def run_program(argv: Sequence[str]) -> None:
    """Run a program to its end. Raises `ProgramError` with the last line of its output.

    A process that it leaves behind, such as a proxy in the background, may keep its output open.
    """
    command, tail = " ".join(argv), bytearray()
    with _output_tail(tail) as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
        except OSError as e:
            raise ProgramError(f"cannot run {argv[0]}: {e.strerror or e}") from e
        try:
            async with asyncio.timeout(PROGRAM_S):
                await process.wait()
        except TimeoutError as e:
            raise ProgramError(f"{command} did not end within {PROGRAM_S:g} s") from e
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode:
        last = tail.decode(errors="replace").strip().splitlines()[-1:]
        why = last[0] if last else "it printed nothing"
        raise ProgramError(f"{command} failed with {process.returncode}: {why}")


@contextmanager
def _output_tail(tail: bytearray) -> Iterator[int]:
    """Yield a pipe for a program's output; `tail` has the last bytes afterwards."""
    loop = asyncio.get_running_loop()
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)

    def read() -> None:
        try:
            data = os.read(read_end, _TAIL_BYTES)
        except BlockingIOError:
            return
        tail.extend(data)
        del tail[:-_TAIL_BYTES]
        if not data:
            loop.remove_reader(read_end)

    loop.add_reader(read_end, read)
    try:
        yield write_end
        read()  # what the program wrote just before its end
    finally:
        loop.remove_reader(read_end)
        os.close(read_end)
        os.close(write_end)
