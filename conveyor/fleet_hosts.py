"""The only module that accesses hosts of a fleet: it observes them and installs releases.

`FleetHosts` is the interface. `CommandHosts` calls the front end and runs the commands of the
service's configuration. A pipeline file names a fleet and cannot set commands: a user who may write
pipelines need not have the rights of this process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from string import Template
from typing import Protocol

from control_plane.api.machines import MachineView
from control_plane.client import ControlPlaneClient
from conveyor.config import FleetSettings
from conveyor.core.fleet import ObservedHost
from wire.errors import HostError, TwineError

PROBE_S = 30.0
"""Time limit of a probe."""
PROBES = 32
"""Probes of all fleets that run at once: each is a process, such as one of ssh."""
_OUTPUT_BYTES = 64 << 10
"""Bytes of a command's output that are kept, the last ones."""
_SHOWN_LINES, _SHOWN = 8, 800
"""Last lines and characters of the output in an error: dpkg prints four lines after the reason."""


class FleetHosts(Protocol):
    """The service's access to hosts."""

    async def observe(self, fleet: FleetSettings) -> list[ObservedHost]:
        """Return the hosts of a fleet in their order, or raise `TwineError`."""
        ...

    async def install(self, fleet: FleetSettings, host: str, release: str) -> None:
        """Install a release on a host, even if it is there; a failure raises `TwineError`."""
        ...


class CommandHosts:
    """Implements `FleetHosts` with the front end and with commands."""

    def __init__(self, client: ControlPlaneClient) -> None:
        self._client, self._probes = client, asyncio.Semaphore(PROBES)

    async def observe(self, fleet: FleetSettings) -> list[ObservedHost]:
        """Return the hosts, from their probes or from the control plane's view of their agents."""
        if fleet.probe:
            return await asyncio.gather(*(self._probe(fleet, name) for name in fleet.hosts))
        views = {v.record.machine: v for v in (await self._client.list_machines()).machines}
        names = fleet.hosts or sorted(n for n, v in views.items() if v.record.facts is not None)
        return [_from_view(name, views.get(name)) for name in names]

    async def _probe(self, fleet: FleetSettings, host: str) -> ObservedHost:
        try:
            async with self._probes:
                output = await _run(_fill_in(fleet.probe, {"host": host}), PROBE_S)
        except TwineError as e:
            return ObservedHost(host, "", False, str(e))
        return ObservedHost(
            host, output.strip(), bool(output.strip()), "its probe printed no release"
        )

    async def install(self, fleet: FleetSettings, host: str, release: str) -> None:
        """Run the command that installs a release on a host."""
        command = _fill_in(fleet.install, {"host": host, "release": release})
        await _run(command, fleet.install_timeout_s)


def _from_view(name: str, view: MachineView | None) -> ObservedHost:
    if view is None or view.record.facts is None:
        return ObservedHost(name, "", False, "the control plane has no such machine")
    ago = "" if view.last_seen_s is None else f", last contact {view.last_seen_s:.0f} s ago"
    why = view.health or f"its agent does not answer{ago}"
    return ObservedHost(name, view.record.facts.agent_version, view.ready, why)


def _fill_in(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    return [Template(word).safe_substitute(values) for word in command]


async def _run(command: Sequence[str], timeout_s: float) -> str:
    """Return a command's output, or raise `HostError` with its exit code and last output."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as e:
        raise HostError(f"cannot run {command[0]}: {e}") from e
    assert process.stdout is not None
    output, is_over = b"", False
    try:
        async with asyncio.timeout(timeout_s):
            while chunk := await process.stdout.read(1 << 14):
                output = (output + chunk)[-_OUTPUT_BYTES:]
            await process.wait()
            is_over = True
    except TimeoutError as e:
        raise HostError(
            f"{command[0]} did not end within {timeout_s:g} s: {_last_lines(output)}"
        ) from e
    finally:
        if not is_over:  # the command runs, or processes that it started have its output open
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise HostError(f"{command[0]} ended with {process.returncode}: {_last_lines(output)}")
    return output.decode(errors="replace")


def _last_lines(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return " / ".join(lines[-_SHOWN_LINES:])[-_SHOWN:] or "it printed nothing"
