"""Runs sidekick to apply a host profile, in its own unit that outlives the agent.

Sidekick writes a report file (docs/adr/0008); the agent shows the latest report.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from agent.api import ProfileSpec, ProfileState, ProfileStatus
from agent.runtime.events import HostEvents
from agent.runtime.offload import Lanes
from agent.runtime.poll_timers import pause
from agent.runtime.units import Units
from wire import durable
from wire.errors import Conflict, HostError, TwineError, Unprocessable

log = logging.getLogger(__name__)

UNIT = "twine-sidekick.service"
LANE = "profile"
DELIVERED_PROFILES = "profiles"
"""Folder in sidekick's state with profiles whose text came with a request."""
SWITCH_TIMEOUT_S = 600.0
"""A switch with hugepages took 244 s at the 90th percentile (paper, Figure 17)."""
REPORT_VALID_S = 600.0
"""How long a report counts. `sidekick-verify.timer` makes one every two minutes; if it stops, the
last report must not count forever (HP15)."""
WATCH_S = 10.0
"""Pause between checks for another report, by one stat of a small file, and for other profiles, by
a listing of three folders. `sidekick-verify.timer` makes a report every two minutes."""
RETRY_S = 1.0
"""Pause after a systemd that did not answer at the agent's start."""
_SETTLED_S = 2.0
"""From this age in s an unchanged mtime proves an unchanged file, because mtime is coarse."""


class HostProfile:
    """The profile of the host, which sidekick applies."""

    def __init__(
        self,
        units: Units,
        events: HostEvents,
        lanes: Lanes,
        sidekick: Path,
        state: Path,
        boot_id: str,
        uptime_s: Callable[[], float],
        installed: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """`sidekick` is the program, `state` the folder of its reports; `uptime_s` is the time
        since the boot `boot_id`, which no step of the clock moves. `installed` returns the names
        of all profiles.
        """
        self._installed = installed
        self._boot_id = boot_id
        self._uptime_s = uptime_s
        self._last_event: tuple[object, ...] | None = None
        """Name, generation, state and installed profiles at the last event."""
        self._units = units
        self._events = events
        self._lanes = lanes
        self._sidekick = sidekick
        self._state = state
        self._cached_report: tuple[tuple[int, ...], ProfileStatus] | None = None
        """The last report that was read, and its file: inode, size, time."""
        self._requested: ProfileSpec | None = None
        self._pending = False
        """Whether sidekick must still be started for the last request."""
        self._failure = ""
        self._running = True
        """Whether a sidekick of ours runs, or may run; `adopt` checks it."""
        self._lock = asyncio.Lock()

    async def status(self) -> ProfileStatus:
        """Return the profile of the host; during a switch, the state `applying`."""
        return self._combined(await self._lanes.run(LANE, self._reported))

    def _combined(self, reported: ProfileStatus) -> ProfileStatus:
        """Return the status with the last request, given what sidekick reported."""
        requested = self._requested
        if requested is None or (requested.name, requested.generation) == (
            reported.name,
            reported.generation,
        ):
            return reported
        state = ProfileState.DEGRADED if self._failure else ProfileState.APPLYING
        return ProfileStatus(
            name=requested.name,
            generation=requested.generation,
            epoch=requested.epoch,
            state=state,
            detail=self._failure or "sidekick is running",
        )

    def _reported(self) -> ProfileStatus:
        """Return sidekick's last report. Blocking: the file is on the disk of the state."""
        try:
            report = self._report(self._state / "status.json")
            return _checked(report, self._boot_id, self._uptime_s(), running=self._running)
        except FileNotFoundError:
            return ProfileStatus()
        except (OSError, msgspec.DecodeError, UnicodeError, RecursionError) as e:
            return ProfileStatus(
                state=ProfileState.DEGRADED, detail=f"sidekick's report cannot be read: {e}"
            )

    def _report(self, path: Path) -> ProfileStatus:
        """Return the content of a report; it is read again only if its stat has changed."""
        at = path.stat()
        which = (at.st_ino, at.st_size, at.st_mtime_ns)
        if self._cached_report is not None and self._cached_report[0] == which:
            return self._cached_report[1]
        report = msgspec.json.decode(path.read_bytes(), type=ProfileStatus)
        settled = time.time() - at.st_mtime > _SETTLED_S
        self._cached_report = (which, report) if settled else None
        return report

    async def ask(self, spec: ProfileSpec, latest_epoch: int | None = None) -> bool:
        """Accept a request; return whether there is anything to `apply`.

        Raises `Conflict` for a request that is too old. `latest_epoch` is the latest epoch of the
        control plane; a profile in force with a later epoch is replaced (BUG-HT25).
        """
        current = await self.status()
        is_repair = latest_epoch is not None and current.epoch > latest_epoch
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
        self._requested, self._failure, self._pending = spec, "", True
        return True

    def _store_text(self, spec: ProfileSpec) -> None:
        """Write the text of a profile to sidekick's folder for delivered profiles."""
        path, data = self._state / DELIVERED_PROFILES / f"{spec.name}.toml", spec.text.encode()
        try:
            if path.is_file() and path.read_bytes() == data:
                return
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            durable.write(path, data, 0o644)
        except OSError as e:
            raise HostError(f"profile {spec.name} cannot be kept: {e.strerror}") from e

    async def adopt(self) -> None:
        """Wait for a sidekick that an earlier agent started; repeat until systemd answers."""
        while True:
            try:
                return await self._adopt()
            except TwineError as e:
                log.warning("cannot read whether sidekick runs", extra={"why": str(e)})
            await asyncio.sleep(RETRY_S)

    async def _adopt(self) -> None:
        async with self._lock:
            self._running = await self._units.find(UNIT) is not None
            if self._running:
                try:
                    await self._units.finish(UNIT, timeout_s=SWITCH_TIMEOUT_S + 30.0)
                except TwineError as e:
                    log.warning("sidekick failed", extra={"why": str(e)})
                self._running = False
                await self._add_event()

    async def apply(self) -> None:
        """Run sidekick for the latest request; its report has the outcome."""
        async with self._lock:
            spec = self._requested
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
            reported = await self._lanes.run(LANE, self._reported)
            if self._requested is spec:
                self._finish(spec, reported, failure)
            await self._add_event()

    async def watch(self) -> None:
        """Add an event when the reported state changes without a request.

        Reasons are a setting that was changed by hand, a sidekick that no longer checks, or a
        profile that was installed or removed.
        """
        while True:
            if not self._running and (await self._event_key())[0] != self._last_event:
                await self._add_event()
            await pause(WATCH_S)

    async def _add_event(self) -> None:
        self._last_event, status = await self._event_key()
        self._events.add("profile", status.name, f"{status.state}: {status.detail}")

    async def _event_key(self) -> tuple[tuple[object, ...], ProfileStatus]:
        """Return what must not change without an event, and the status."""
        reported, installed = await self._lanes.run(LANE, self._read_state)
        status = self._combined(reported)
        return (status.name, status.generation, status.state, installed), status

    def _read_state(self) -> tuple[ProfileStatus, tuple[str, ...]]:
        """Return sidekick's last report, and the names of all profiles. Blocking."""
        return self._reported(), self._installed()

    def _finish(self, spec: ProfileSpec, reported: ProfileStatus, failure: str) -> None:
        if (reported.name, reported.generation) == (spec.name, spec.generation):
            self._requested = None
        else:
            self._failure = failure or f"sidekick ended without a report; see journalctl -u {UNIT}"

    async def _run(self, spec: ProfileSpec) -> None:
        if spec.text:
            await self._lanes.run(LANE, self._store_text, spec)
        command = [
            str(self._sidekick),
            "apply-profile",
            spec.name,
            f"--generation={spec.generation}",
            f"--epoch={spec.epoch}",
            "--wait-s=60",  # `verify` of the timer holds the lock for a moment
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
    """Refuse a text whose name does not end with its digest, so that a name has only one text."""
    digest = hashlib.sha256(spec.text.encode()).hexdigest()
    if spec.text and not spec.name.endswith(f"-{digest[:12]}"):
        raise Unprocessable(
            f"profile {spec.name} is not taken: the digest of its text is {digest[:12]}…",
            hint="the received text does not match the requested digest",
        )


def _checked(
    report: ProfileStatus, boot_id: str, uptime_s: float, *, running: bool
) -> ProfileStatus:
    """Return the report, with the state `drifted` if it can no longer be trusted.

    A verification of an earlier boot does not count; `sidekick resume` should have reported again.
    Neither does one older than `REPORT_VALID_S`. A switch without a process was interrupted. All
    three count as drift: requesting the profile again repairs the host.
    """
    age_s = uptime_s - report.uptime_s
    if report.state is ProfileState.VERIFIED and report.boot_id not in ("", boot_id):
        detail = "last verified before this boot: did sidekick-resume.service run?"
    elif report.state is ProfileState.VERIFIED and report.uptime_s and age_s > REPORT_VALID_S:
        detail = f"not verified for {age_s:.0f} s: does sidekick-verify.timer run?"
    elif report.state is ProfileState.APPLYING and not running:
        detail = f"sidekick was interrupted: {report.detail}"
    else:
        return report
    return msgspec.structs.replace(report, state=ProfileState.DRIFTED, detail=detail)
