"""Asks sidekick for another host profile, in a unit of its own that outlives the agent.

Sidekick reports by file (docs/adr/0008): what it wrote last is what the agent shows.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from agent.api import ProfileSpec, ProfileState, ProfileStatus
from agent.runtime.events import HostEvents
from agent.runtime.poll_timers import pause
from agent.runtime.units import Units
from wire.errors import Conflict, HostError, TwineError, Unprocessable

log = logging.getLogger(__name__)

UNIT = "twine-sidekick.service"
DELIVERED = "profiles"
"""Folder in sidekick's state: profiles that were delivered with a request."""
SWITCH_TIMEOUT_S = 600.0
"""A switch with hugepages took 244 s at the 90th percentile (paper, Figure 17)."""
BELIEVED_S = 600.0
"""How long a report is taken for how the host is: `sidekick-verify.timer` looks every two
minutes, and one that does not must not vouch for a host for ever (HP15)."""
WATCH_S = 10.0
"""How often to check for another report: one stat of a small file.
`sidekick-verify.timer` makes one every two minutes."""
_SETTLED_S = 2.0
"""Age in s from which an unchanged mtime proves an unchanged file: mtimes have ticks."""


class HostProfile:
    """The host's profile, as sidekick brings it about."""

    def __init__(
        self,
        units: Units,
        events: HostEvents,
        sidekick: Path,
        state: Path,
        boot_id: str,
        uptime_s: Callable[[], float],
    ) -> None:
        """`sidekick` is the program, `state` the folder of its reports; `uptime_s` is the time
        since the boot `boot_id`, which no step of the clock moves.
        """
        self._boot_id = boot_id
        self._uptime_s = uptime_s
        self._told: tuple[str, int, str] | None = None
        """What the last event said."""
        self._units = units
        self._events = events
        self._sidekick = sidekick
        self._state = state
        self._read: tuple[tuple[int, ...], ProfileStatus] | None = None
        """The report as it was read last, and its file: inode, size, time."""
        self._asked: ProfileSpec | None = None
        self._pending = False
        """Whether what was asked for last has still to be given to sidekick."""
        self._failure = ""
        self._running = True
        """Whether a sidekick of ours is, or may be, at work; `adopt` looks."""
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
            report = self._report(self._state / "status.json")
            return _believable(report, self._boot_id, self._uptime_s(), running=self._running)
        except FileNotFoundError:
            return ProfileStatus()
        except (OSError, msgspec.DecodeError, UnicodeError, RecursionError) as e:
            return ProfileStatus(
                state=ProfileState.DEGRADED, detail=f"sidekick's report cannot be read: {e}"
            )

    def _report(self, path: Path) -> ProfileStatus:
        """Return the content of a report; it is not read again while its stat is the same."""
        at = path.stat()
        which = (at.st_ino, at.st_size, at.st_mtime_ns)
        if self._read is not None and self._read[0] == which:
            return self._read[1]
        report = msgspec.json.decode(path.read_bytes(), type=ProfileStatus)
        settled = time.time() - at.st_mtime > _SETTLED_S
        self._read = (which, report) if settled else None
        return report

    def ask(self, spec: ProfileSpec, said: int | None = None) -> bool:
        """Accept a request; return whether there is anything to `apply`.

        Raises `Conflict` for one that is too old. `said` is the latest epoch of a control plane;
        a profile in force with a later epoch is replaced (BUG-HT25).
        """
        current = self.status()
        is_repair = said is not None and current.epoch > said
        is_old = (spec.epoch, spec.generation) < (current.epoch, current.generation)
        if is_old and not is_repair:
            raise Conflict(
                f"profile {spec.name} is not applied: generation {spec.generation} of epoch "
                f"{spec.epoch} is older than {current.generation} of {current.epoch}"
            )
        _check_text(spec)
        same = (spec.name, spec.generation) == (current.name, current.generation)
        if same and current.state in (ProfileState.VERIFIED, ProfileState.APPLYING):
            return False
        self._asked, self._failure, self._pending = spec, "", True
        return True

    def _deliver(self, spec: ProfileSpec) -> None:
        """Write the text of a profile to sidekick's folder for profiles without a package."""
        path, data = self._state / DELIVERED / f"{spec.name}.toml", spec.text.encode()
        try:
            if path.is_file() and path.read_bytes() == data:
                return
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            _write(path, data)
        except OSError as e:
            raise HostError(f"profile {spec.name} cannot be kept: {e.strerror}") from e

    async def adopt(self) -> None:
        """Wait for a sidekick that an earlier agent started; it outlives the agent."""
        async with self._lock:
            self._running = await self._units.find(UNIT) is not None
            if self._running:
                try:
                    await self._units.finish(UNIT, timeout_s=SWITCH_TIMEOUT_S + 30.0)
                except TwineError as e:
                    log.warning("sidekick failed", extra={"why": str(e)})
                self._running = False
                self._tell()

    async def apply(self) -> None:
        """Run sidekick for the latest request; its report then tells what came of it."""
        async with self._lock:
            spec = self._asked
            if spec is None or not self._pending:
                return
            self._pending = False
            self._events.add("profile", spec.name, "applying")
            failure = ""
            self._running = True
            try:
                await self._run(spec)
            except TwineError as e:
                failure = str(e)
                log.warning("sidekick failed", extra={"profile": spec.name, "why": failure})
            finally:
                self._running = False
            if self._asked is spec:
                self._finish(failure)
            self._tell()

    async def watch(self) -> None:
        """Add an event when the host is found to be otherwise than before.

        That was not asked for: a setting was changed by hand, or sidekick no longer checks.
        """
        while True:
            if not self._running and self._key() != self._told:
                self._tell()
            await pause(WATCH_S)

    def _tell(self) -> None:
        status = self.status()
        self._told = self._key()
        self._events.add("profile", status.name, f"{status.state}: {status.detail}")

    def _key(self) -> tuple[str, int, str]:
        status = self.status()
        return status.name, status.generation, status.state

    def _finish(self, failure: str) -> None:
        reported, asked = self._reported(), self._asked
        assert asked is not None
        if (reported.name, reported.generation) == (asked.name, asked.generation):
            self._asked = None
        else:
            self._failure = failure or f"it ended without a report; see journalctl -u {UNIT}"

    async def _run(self, spec: ProfileSpec) -> None:
        if spec.text:
            await asyncio.to_thread(self._deliver, spec)
        command = [
            str(self._sidekick),
            "apply-profile",
            spec.name,
            f"--generation={spec.generation}",
            f"--epoch={spec.epoch}",
            "--wait-s=60",  # the timer's `verify` holds the lock for an instant
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
            "ManagedOOMPreference": "omit",
        }
        await self._units.run(UNIT, properties, timeout_s=SWITCH_TIMEOUT_S + 30.0)


def _check_text(spec: ProfileSpec) -> None:
    """Refuse a text whose name does not end with its digest: a name never means another text."""
    digest = hashlib.sha256(spec.text.encode()).hexdigest()
    if spec.text and not spec.name.endswith(f"-{digest[:12]}"):
        raise Unprocessable(
            f"profile {spec.name} is not taken: the digest of its text is {digest[:12]}…",
            hint="what was delivered is not what was named",
        )


def _write(path: Path, data: bytes) -> None:
    """Put a file in place whole, on the disk, or not at all."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _believable(
    report: ProfileStatus, boot_id: str, uptime_s: float, *, running: bool
) -> ProfileStatus:
    """Return the report, unless it cannot be true any more.

    What was verified in an earlier boot proves nothing in this one (`sidekick resume` reports
    again at each boot; this is for when it did not), nor does what was not checked for
    long; and a switch without a process was interrupted. All is drift: asking again brings
    the host back.
    """
    age_s = uptime_s - report.uptime_s
    if report.state is ProfileState.VERIFIED and report.boot_id not in ("", boot_id):
        detail = "verified in an earlier boot only: did sidekick-resume.service run?"
    elif report.state is ProfileState.VERIFIED and report.uptime_s and age_s > BELIEVED_S:
        detail = f"not looked at for {age_s:.0f} s: does sidekick-verify.timer run?"
    elif report.state is ProfileState.APPLYING and not running:
        detail = f"sidekick was interrupted: {report.detail}"
    else:
        return report
    return msgspec.structs.replace(report, state=ProfileState.DRIFTED, detail=detail)
