"""Asks sidekick for another host profile, in a unit of its own that outlives the agent.

Sidekick reports by file (docs/adr/0008): what it wrote last is what the agent shows.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from agent.api import ProfileSpec, ProfileState, ProfileStatus
from agent.errors import Conflict, HostError
from agent.services.events import EventLog
from agent.services.units import Units

log = logging.getLogger(__name__)

UNIT = "twine-sidekick.service"
SWITCH_TIMEOUT_S = 600.0
"""A switch with hugepages took 244 s at the 90th percentile (paper, Figure 17)."""


class HostProfile:
    """The host's profile, as sidekick brings it about."""

    def __init__(self, units: Units, events: EventLog, sidekick: Path, state: Path) -> None:
        """`sidekick` is the program, `state` the folder of its reports."""
        self._units = units
        self._events = events
        self._sidekick = sidekick
        self._state = state
        self._asked: ProfileSpec | None = None
        self._failure = ""
        self._lock = asyncio.Lock()

    def status(self) -> ProfileStatus:
        """Return what the host runs; while a switch goes on, that it does."""
        reported = self._reported()
        asked = self._asked
        if asked is None or (asked.name, asked.generation) == (reported.name, reported.generation):
            return reported
        state = ProfileState.DEGRADED if self._failure else ProfileState.APPLYING
        return ProfileStatus(
            name=asked.name,
            generation=asked.generation,
            epoch=asked.epoch,
            state=state,
            detail=self._failure or "sidekick is at it",
        )

    def _reported(self) -> ProfileStatus:
        try:
            data = (self._state / "status.json").read_bytes()
            return msgspec.json.decode(data, type=ProfileStatus)
        except FileNotFoundError:
            return ProfileStatus()
        except (OSError, msgspec.DecodeError) as e:
            return ProfileStatus(
                state=ProfileState.DEGRADED, detail=f"sidekick's report cannot be read: {e}"
            )

    def check(self, spec: ProfileSpec) -> bool:
        """Return whether a request is news. Raises `Conflict` for one that is too old."""
        current = self.status()
        if spec.epoch < current.epoch or (
            spec.epoch == current.epoch and spec.generation < current.generation
        ):
            raise Conflict(
                f"profile {spec.name} is not applied: generation {spec.generation} of epoch "
                f"{spec.epoch} is older than {current.generation} of {current.epoch}"
            )
        same = (spec.name, spec.generation) == (current.name, current.generation)
        return not (same and current.state in (ProfileState.VERIFIED, ProfileState.APPLYING))

    async def apply(self, spec: ProfileSpec) -> None:
        """Run sidekick to its end; its report then tells what came of it."""
        async with self._lock:
            self._asked, self._failure = spec, ""
            self._events.add("profile", spec.name, "applying")
            try:
                await self._run(spec)
            except HostError as e:
                self._failure = str(e)
                log.warning("sidekick failed", extra={"profile": spec.name, "why": str(e)})
            status = self.status()
            if status.state is ProfileState.APPLYING:
                self._failure = "sidekick ended without a report; see journalctl -u " + UNIT
                status = self.status()
            else:
                self._asked = None if not self._failure else self._asked
            self._events.add("profile", spec.name, f"{status.state}: {status.detail}")

    async def _run(self, spec: ProfileSpec) -> None:
        command = [
            str(self._sidekick),
            "apply-profile",
            spec.name,
            f"--generation={spec.generation}",
            f"--epoch={spec.epoch}",
            "-o",
            "json",
        ]
        if spec.allow_reboot:
            command.append("--reboot")
        properties: dict[str, object] = {
            "Description": f"Twine brings the host to profile {spec.name}",
            "Type": "oneshot",
            "RemainAfterExit": True,
            "CollectMode": "inactive",
            "ExecStart": [command],
            "TimeoutStartUSec": round(SWITCH_TIMEOUT_S * 1e6),
            "Slice": "system.slice",
        }
        await self._units.run(UNIT, properties, timeout_s=SWITCH_TIMEOUT_S + 30.0)
