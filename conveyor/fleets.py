"""Fleets of hosts as targets of pipelines: stores which release is wanted, and installs it.

`FleetReleases` has the interface of jobs (`PushWriter`). The wanted state is stored before a host
is changed. A command that a crash interrupted is run again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from control_plane.runtime.runtime import Runtime
from control_plane.store import Put, Store
from conveyor.api import FLEET
from conveyor.config import FleetSettings
from conveyor.core import fleet
from conveyor.core.acts import DeliveryAct
from conveyor.core.fleet import FleetRecord, FleetTimeouts, ObservedHost
from conveyor.fleet_hosts import FleetHosts
from conveyor.push import PushWriter
from conveyor.records import decoded, encoded
from conveyor.runs import JobProgress
from wire.errors import Busy, NotFound, TwineError

log = logging.getLogger(__name__)
FLEETS = "fleets/"
Change = Callable[[FleetRecord], FleetRecord]


class FleetReleases:
    """Implements `PushWriter` for fleets; calls for jobs go to the writer of jobs."""

    def __init__(
        self,
        store: Store,
        jobs: PushWriter,
        hosts: FleetHosts,
        settings: Mapping[str, FleetSettings],
        runtime: Runtime,
        round_s: float,
        boot: str = "",
    ) -> None:
        """`boot` names this boot of the host; empty: not known."""
        self._store, self._jobs, self._hosts = store, jobs, hosts
        self._settings, self._runtime, self._round_s = settings, runtime, round_s
        self._boot = boot
        self._locks = {name: asyncio.Lock() for name in settings}

    async def read_progress(self, job: str, image: str) -> JobProgress:
        """Return the progress of a job or a fleet with an image or a release."""
        if not job.startswith(FLEET):
            return await self._jobs.read_progress(job, image)
        name = job.removeprefix(FLEET)
        if name not in self._settings:
            return JobProgress(job=job)
        record, _ = await self._read(name)
        settings = self._settings[name]
        hosts = await self._hosts.observe(settings)
        return fleet.fleet_progress(job, record, hosts, image, settings.max_unavailable)

    async def newest_image(self, name: str) -> str:
        """Return the newest image of a name; only jobs have images."""
        return await self._jobs.newest_image(name)

    async def write(self, act: DeliveryAct) -> None:
        """Write the wanted state of a job or a fleet."""
        if not act.job.startswith(FLEET):
            return await self._jobs.write(act)
        name = act.job.removeprefix(FLEET)
        if name not in self._settings:
            raise NotFound(f"there is no fleet {name!r}", hint="conveyor.toml: [fleets.NAME]")
        record, common = (await self._read(name))[0], ""
        if not record.release:
            common = fleet.common_release(await self._hosts.observe(self._settings[name]))
        await self._change(name, lambda record: fleet.apply_act(record, act, common))

    async def run(self) -> None:
        """Carry out the wanted state of all fleets until cancelled; `Busy` if the store is lost."""
        loops = [asyncio.ensure_future(self._run_rounds(name)) for name in self._settings]
        try:
            await asyncio.gather(*loops, asyncio.Event().wait())
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

    async def _run_rounds(self, name: str) -> None:
        while True:
            try:
                await self.round(name)
            except TwineError as e:
                if failure := self._store.failure():
                    raise Busy(f"the service cannot continue: {failure}") from e
                log.warning("state of a fleet is unknown", extra={"fleet": name, "reason": str(e)})
            await asyncio.sleep(self._round_s)

    async def round(self, name: str) -> None:
        """Observe the hosts, decide, store the decision, and run the command of one host."""
        settings = self._settings[name]
        record, _ = await self._read(name)
        if not record.release:
            return
        hosts: list[ObservedHost] = []
        if record.work is None or record.work.installed is not None:
            hosts = await self._hosts.observe(settings)
        timeouts, now = FleetTimeouts(settings.healthy_s, settings.settle_s), self._runtime.date()

        def advance(record: FleetRecord) -> FleetRecord:
            continued = fleet.continued_on(record, now, self._boot)
            return fleet.advance(continued, hosts, timeouts, now) if hosts else record

        after = await self._change(name, advance)
        if after.work is not None and after.work.installed is None:
            await self._install(name, after.work.host, after.work.release)

    async def _install(self, name: str, host: str, release: str) -> None:
        """Run the command of a host without the fleet's lock, and store its result."""
        if failure := self._store.failure():
            raise Busy(f"cannot change hosts: {failure}")
        log.info("install", extra={"fleet": name, "host": host, "release": release})
        try:
            await self._hosts.install(self._settings[name], host, release)
        except TwineError as e:
            failed, now = str(e), self._runtime.date()
            log.warning("install failed", extra={"fleet": name, "host": host, "reason": failed})
            await self._change(name, lambda record: fleet.after_failure(record, failed, now))
        else:
            now = self._runtime.date()
            await self._change(name, lambda record: fleet.after_install(record, now, self._boot))

    async def _read(self, name: str) -> tuple[FleetRecord, int]:
        entry = await self._store.get(FLEETS + name)
        if entry is None:
            return FleetRecord(), 0
        return decoded(entry.value, FleetRecord, entry.key), entry.revision

    async def _change(self, name: str, change: Change) -> FleetRecord:
        """Apply a change to the stored record of a fleet, and return the result."""
        async with self._locks[name]:
            before, revision = await self._read(name)
            after = change(before)
            if after != before:
                put = Put(FLEETS + name, encoded(after))
                await self._store.txn({put.key: revision}, [put])
            return after
