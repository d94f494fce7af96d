"""Asks sidekick for another host profile, in a unit of its own that outlives the agent.

Sidekick reports by file (docs/adr/0008): what it wrote last is what the agent shows.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from agent.api import ProfileSpec, ProfileState, ProfileStatus
from agent.errors import Conflict, TwineError
from agent.services.events import EventLog
from agent.services.units import Units

log = logging.getLogger(__name__)

UNIT = "twine-sidekick.service"
SWITCH_TIMEOUT_S = 600.0
"""A switch with hugepages took 244 s at the 90th percentile (paper, Figure 17)."""


class HostProfile:
    """The host's profile, as sidekick brings it about."""

    def __init__(
        self, units: Units, events: EventLog, sidekick: Path, state: Path, boot_id: str
    ) -> None:
        """`sidekick` is the program, `state` the folder of its reports."""
        self._boot_id = boot_id
        self._units = units
        self._events = events
        self._sidekick = sidekick
        self._state = state
        self._asked: ProfileSpec | None = None
        self._pending = False
        """Whether what was asked for last has still to be given to sidekick."""
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
            return _in_this_boot(msgspec.json.decode(data, type=ProfileStatus), self._boot_id)
        except FileNotFoundError:
            return ProfileStatus()
        except (OSError, msgspec.DecodeError, UnicodeError, RecursionError) as e:
            return ProfileStatus(
                state=ProfileState.DEGRADED, detail=f"sidekick's report cannot be read: {e}"
            )

    def ask(self, spec: ProfileSpec) -> bool:
        """Take a request; return whether there is anything to `apply`.

        Raises `Conflict` for one that is too old.
        """
        current = self.status()
        if (spec.epoch, spec.generation) < (current.epoch, current.generation):
            raise Conflict(
                f"profile {spec.name} is not applied: generation {spec.generation} of epoch "
                f"{spec.epoch} is older than {current.generation} of {current.epoch}"
            )
        same = (spec.name, spec.generation) == (current.name, current.generation)
        if same and current.state in (ProfileState.VERIFIED, ProfileState.APPLYING):
            return False
        self._asked, self._failure, self._pending = spec, "", True
        return True

    async def apply(self) -> None:
        """Run sidekick for the latest request; its report then tells what came of it."""
        async with self._lock:
            spec = self._asked
            if spec is None or not self._pending:
                return
            self._pending = False
            self._events.add("profile", spec.name, "applying")
            failure = ""
            try:
                await self._run(spec)
            except TwineError as e:
                failure = str(e)
                log.warning("sidekick failed", extra={"profile": spec.name, "why": failure})
            if self._asked is spec:
                self._finish(failure)
            status = self.status()
            self._events.add("profile", spec.name, f"{status.state}: {status.detail}")

    def _finish(self, failure: str) -> None:
        reported, asked = self._reported(), self._asked
        assert asked is not None
        if (reported.name, reported.generation) == (asked.name, asked.generation):
            self._asked = None
        else:
            self._failure = failure or f"it ended without a report; see journalctl -u {UNIT}"

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


def _in_this_boot(reported: ProfileStatus, boot_id: str) -> ProfileStatus:
    """Return the report; what was verified in an earlier boot proves nothing in this one.

    `sidekick resume` reports anew at each boot; this is for when it did not.
    """
    if reported.state is not ProfileState.VERIFIED or reported.boot_id in ("", boot_id):
        return reported
    return msgspec.structs.replace(
        reported,
        state=ProfileState.DRIFTED,
        detail="verified in an earlier boot only: did sidekick-resume.service run?",
    )
