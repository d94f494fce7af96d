"""Carries out maintenance plans: announces one wave after another, and waits until each returns.

Plans and waves are stored before anything is announced. After a restart the planner continues from
the stored plans and the present state of the machines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from msgspec.structs import replace

from control_plane.agents.region import Region
from control_plane.api.machines import EventKind
from control_plane.api.maintenance import (
    KIND,
    MACHINES_MAX,
    Ends,
    GoOn,
    MaintenanceRequest,
    PlanRecord,
    PlanState,
    PlanView,
    Preview,
    WaveRecord,
    WaveState,
    Work,
)
from control_plane.broker.core.unavailability import of_plan, planned
from control_plane.ops_planner.core.waves import (
    Stage,
    advance,
    check_name,
    check_request,
    count_done,
    end_condition,
    is_power_shed,
    is_sequential,
    plan_view,
    stages_of,
)
from control_plane.ops_planner.hosts import PlanMachines
from control_plane.ops_planner.ports import Announcements
from control_plane.ops_planner.preview import Previewer
from control_plane.runtime.job_table import JobTable
from control_plane.runtime.table import Table
from control_plane.scheduler.counters import Counters
from control_plane.scheduler.ports import Places
from control_plane.store import Store
from control_plane.store.quarantine import quarantined
from control_plane.store.records import PLANS, WAVES
from wire.errors import Conflict, InvalidInput, NotFound, TwineError

log = logging.getLogger(__name__)
_CHECK_S = 2.0
"""Interval between two checks of the plans under way."""
_ENDED_KEPT = 200
"""Number of ended plans that are kept."""


class OpsPlanner:
    """Owner of the plans."""

    def __init__(
        self,
        region: Region,
        allocator: Places,
        owner: Callable[[str], Places | None],
        jobs: JobTable,
        outages: Announcements,
        counters: Counters,
        store: Store,
    ) -> None:
        self._plans: Table[PlanRecord] = Table(store, PLANS, PlanRecord, "maintenance plan")
        self._waves: Table[WaveRecord] = Table(store, WAVES, WaveRecord, "wave")
        self._broker, self._runtime, self._outages = region.broker, region.runtime, outages
        self._hosts = PlanMachines(region, allocator.directory)
        self._damaged: set[str] = set()
        """Plans whose record, or that of a wave, was set aside as damaged."""
        self.previewer = Previewer(region, jobs, allocator, owner, counters)

    async def load(self) -> None:
        """Read all plans, and which of them were set aside as damaged."""
        await self._plans.load()
        await self._waves.load()
        for name in await quarantined(self._plans.store):
            for prefix in (PLANS, WAVES):
                if name.startswith(prefix):
                    self._damaged.add(name.removeprefix(prefix).partition("/")[0])

    async def run(self) -> None:
        """Carry plans out until cancelled."""
        while True:
            steps = [(name, self._end_damaged) for name in sorted(self._damaged)]
            steps += [
                (p.name, self._advance_plan) for p in self._plans.records() if p.ended is None
            ]
            for name, step in steps:
                try:
                    await step(name)
                except TwineError as e:  # the next check tries again
                    fields = {"plan": name, "reason": str(e)}
                    log.warning("check of a plan failed", extra=fields)
            await self._runtime.sleep(_CHECK_S)

    # -- requests of operators

    async def preview(self, name: str, request: MaintenanceRequest) -> Preview:
        """Return what a plan would do; changes nothing."""
        check_name(name)
        waves = await self._divide(name, request)
        return await self.previewer.preview(name, request, waves)

    async def accept(self, name: str, request: MaintenanceRequest, by: str) -> PlanView:
        """Store a plan and begin it; `Conflict` if its preview warns and `despite` is not set."""
        check_name(name)
        async with self._plans.lock(name):
            self._refuse_known(name)
            waves = await self._divide(name, request)
            preview = await self.previewer.preview(name, request, waves)
            if preview.warnings and not request.despite:
                count = len(preview.warnings)
                more = f" (and {count - 1} more)" if count > 1 else ""
                raise Conflict(
                    f"plan {name} is not accepted: {preview.warnings[0]}{more}",
                    hint="twinectl maintenance plan shows all of it; apply it with --despite",
                )
            now = self._runtime.date()
            plan = PlanRecord(
                name=name,
                request=replace(request, machines=[], despite=False),
                ends=end_condition(request),
                by=by,
                at=now,
                machines=sum(map(len, waves)),
                waves=len(waves),
            )
            records = [
                WaveRecord(plan=name, number=number, machines=machines)
                for number, machines in enumerate(waves, 1)
            ]
            for record in records:  # before the plan, which would count as done without waves
                await self._put_wave(record)
            await self._plans.commit(name, plan)
            log.info("maintenance planned", extra={"plan": name, "machines": plan.machines})
        await self._drop_old()
        await self._advance_plan(name)
        return self.show(name)

    def show(self, name: str) -> PlanView:
        """Return a plan with all its waves."""
        plan = self._plans.get(name)
        waves = self._waves_of(plan)
        return plan_view(plan, waves, self._hosts.of(plan, waves), self._runtime.date())

    def list_plans(self) -> list[PlanView]:
        """Return all plans, the newest first, with the waves that are under way."""
        plans = sorted(self._plans.records(), key=lambda plan: (-plan.at, plan.name))
        views = [self.show(plan.name) for plan in plans]
        return [
            replace(view, waves=[w for w in view.waves if w.state is WaveState.ANNOUNCED])
            for view in views
        ]

    async def cancel(self, name: str) -> PlanView:
        """Cancel a plan: its announcements end, and no further wave begins.

        The decision is stored first: after a failure or a crash the planner completes it.
        """
        async with self._plans.lock(name):
            plan = self._plans.get(name)
            if plan.ended is not None:
                raise Conflict(f"plan {name} is already {plan.state}")
            await self._plans.commit(name, replace(plan, state=PlanState.CANCELLED, detail=""))
        await self._advance_plan(name)
        return self.show(name)

    async def report(self, name: str, machines: Collection[str]) -> PlanView:
        """Record that the work on some machines of a plan is over.

        They must be in active waves, or must have been left out of a wave.
        """
        plan = self._plans.get(name)
        known = {
            machine
            for wave in self._waves_of(plan)
            for machine in (wave.machines if wave.state is WaveState.ANNOUNCED else wave.left_out)
        }
        unknown = sorted(set(machines) - known)
        if unknown:
            raise NotFound(f"plan {name}: {', '.join(unknown[:5])} are in no active wave")
        await self._outages.end_plan(machines, name)
        await self._advance_plan(name)
        return self.show(name)

    async def continue_plan(self, name: str, request: GoOn) -> PlanView:
        """Check a paused plan again; with `without`, leave out the machines that are not back."""
        async with self._plans.lock(name):  # no other actor writes its waves meanwhile
            plan = self._plans.get(name)
            if plan.ended is not None:
                raise Conflict(f"plan {name} is {plan.state}")
            if request.without:
                await self._leave_out_missing(plan)
        await self._advance_plan(name)
        return self.show(name)

    async def _leave_out_missing(self, plan: PlanRecord) -> None:
        """Leave the machines that are not back out of the announced waves."""
        waves = self._waves_of(plan)
        hosts = self._hosts.of(plan, waves)
        for wave in waves:
            if wave.state is WaveState.ANNOUNCED:
                stages = stages_of(wave, hosts, plan.ends)
                missing = [machine for machine, at in stages.items() if at != Stage.DONE]
                left_out = sorted({*wave.left_out, *missing})
                await self._put_wave(replace(wave, left_out=left_out))

    # -- one plan

    async def _advance_plan(self, name: str) -> None:
        """Carry out the next step of a plan."""
        async with self._plans.lock(name):
            plan = self._plans.find(name)
            if plan is None or plan.ended is not None:
                return
            if plan.state is PlanState.CANCELLED:
                await self._end_cancelled(plan)
                return
            waits = await self._advance_waves(plan)
            open_waves = [w for w in self._waves_of(plan) if w.ended is None]
            state = PlanState.PAUSED if waits else PlanState.RUNNING
            changed = replace(plan, state=state, detail=waits)
            if not open_waves and plan.request.work is not Work.POWER_CAP:
                changed = replace(changed, state=PlanState.DONE, ended=self._runtime.date())
            if changed != plan:
                await self._plans.commit(name, changed)
                if waits and waits != plan.detail:
                    log.warning("plan pauses", extra={"plan": name, "reason": waits})

    async def _advance_waves(self, plan: PlanRecord) -> str:
        """Carry out the next step of each wave that may continue; return why the plan pauses."""
        now, waits = self._runtime.date(), ""
        for wave in self._waves_of(plan):
            await self._runtime.checkpoint()
            if wave.state is WaveState.WAITING:
                waves = self._waves_of(plan)
                if is_power_shed(plan, waves, self._hosts.of(plan, waves)):
                    await self._put_wave(replace(wave, state=WaveState.CANCELLED, ended=now))
                    continue
                await self._announce(plan, wave, now)
                if is_sequential(plan.request):
                    break
            elif wave.state is WaveState.ANNOUNCED:
                await self._announce_missing(plan, wave)
                step = advance(plan, wave, self._hosts.of(plan, [wave]), now)
                if step.close:
                    await self._outages.end_plan(step.close, plan.name)
                waits = waits or step.waits
                if step.finish:
                    await self._put_wave(replace(wave, state=WaveState.DONE, ended=now))
                    log.info("wave is over", extra={"plan": plan.name, "wave": wave.number})
                elif is_sequential(plan.request):
                    break
            elif wave.left_out:  # these machines may be back by now
                back = advance(plan, wave, self._hosts.of(plan, [wave]), now).close
                await self._outages.end_plan(back, plan.name)
        return waits

    async def _announce(self, plan: PlanRecord, wave: WaveRecord, now: float) -> None:
        """Begin a wave. It is stored first, so that after a crash the same wave is announced."""
        is_first = wave.number == 1 or not is_sequential(plan.request)
        start = plan.at + plan.request.start_in_s if is_first else now
        boots = {
            name: record.facts.boot_id
            for name in wave.machines
            if (record := self._broker.table.find(name)) is not None and record.facts is not None
        }
        boots = boots if plan.ends is Ends.REBOOT else {}
        wave = replace(wave, state=WaveState.ANNOUNCED, start=max(start, 0.0), boots=boots)
        await self._put_wave(wave)
        log.info("wave is announced", extra={"plan": plan.name, "wave": wave.number})
        await self._announce_missing(plan, wave)

    async def _announce_missing(self, plan: PlanRecord, wave: WaveRecord) -> None:
        """Announce a wave for those of its machines that have no event of it yet."""
        table, request = self._broker.table, plan.request
        missing = [
            name
            for name in wave.machines
            if (record := table.find(name)) is not None
            and of_plan(record, plan.name, plan.at) is None
            and name not in wave.left_out
        ]
        if not missing:
            return
        deadline = None if request.deadline_s is None else wave.start + request.deadline_s
        await self._outages.plan_unavailability(
            missing,
            KIND.get(request.work, EventKind.MAINTENANCE),
            f"{request.work}: {request.reason}",
            wave.start,
            deadline,
            request.duration_s,
            tasks_survive=request.tasks_survive,
            plan=plan.name,
        )

    async def _end_cancelled(self, plan: PlanRecord) -> None:
        """End the waves and announcements of a cancelled plan; the caller has its lock."""
        now, waves = self._runtime.date(), self._waves_of(plan)
        hosts = self._hosts.of(plan, waves)
        for wave in waves:
            if wave.ended is None:
                is_begun = wave.state is WaveState.ANNOUNCED
                done = count_done(wave, hosts, plan.ends) if is_begun else 0
                await self._put_wave(replace(wave, state=WaveState.CANCELLED, done=done, ended=now))
        for wave in waves:
            if wave.state is not WaveState.WAITING:
                await self._outages.end_plan(wave.machines, plan.name)
        await self._plans.commit(plan.name, replace(plan, ended=now))
        log.info("plan ended", extra={"plan": plan.name, "state": plan.state.value})

    async def _end_damaged(self, name: str) -> None:
        """End the events of a damaged plan or wave, whose record no longer shows when they end.

        Events of a wave with a readable record stay if the wave has ended or the plan continues.
        """
        plan = self._plans.find(name)
        kept = {
            machine
            for wave in self._waves.records()
            if wave.plan == name and (wave.ended is not None or plan is not None)
            for machine in wave.machines
        }
        is_over = plan is not None and plan.ended is not None
        for machine in [] if is_over else list(self._broker.table):
            await self._runtime.checkpoint()
            record = self._broker.table.find(machine)
            events = planned(record) if record is not None and machine not in kept else ()
            if any(event.plan == name for event in events):
                await self._outages.end_plan([machine], name)
                fields = {"plan": name, "machine": machine}
                log.warning("announcement of a damaged plan ended", extra=fields)
        self._damaged.discard(name)

    # -- machines and waves

    async def _divide(self, name: str, request: MaintenanceRequest) -> list[list[str]]:
        check_request(request)
        names = await self._outages.machines(request.machines, request.scope)
        if len(names) > MACHINES_MAX:
            raise InvalidInput(f"plan {name} has {len(names)} machines, more than {MACHINES_MAX}")
        return await self.previewer.waves(names, request)

    def _refuse_known(self, name: str) -> None:
        known = self._plans.find(name)
        if known is not None:
            raise Conflict(
                f"there is already a plan {name!r}: it is {known.state}",
                hint="a plan cannot be changed: cancel it, and announce another one"
                if known.ended is None
                else "the record of an ended plan keeps its name: choose another name",
            )

    def _waves_of(self, plan: PlanRecord) -> list[WaveRecord]:
        waves = (self._waves.find(_key(plan.name, n)) for n in range(1, plan.waves + 1))
        return [wave for wave in waves if wave is not None]

    async def _put_wave(self, wave: WaveRecord) -> None:
        key = _key(wave.plan, wave.number)
        async with self._waves.lock(key):
            await self._waves.commit(key, wave)

    async def _drop_old(self) -> None:
        """Delete the ended plans beyond the kept number, the oldest first."""
        ended = [plan for plan in self._plans.records() if plan.ended is not None]
        ended.sort(key=lambda plan: plan.ended or 0.0)
        for plan in ended[:-_ENDED_KEPT]:
            async with self._plans.lock(plan.name):
                for wave in self._waves_of(plan):
                    key = _key(wave.plan, wave.number)
                    async with self._waves.lock(key):
                        await self._waves.commit(key, None)
                await self._plans.commit(plan.name, None)


def _key(plan: str, number: int) -> str:
    return f"{plan}/{number:06d}"
