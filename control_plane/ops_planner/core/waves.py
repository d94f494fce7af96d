"""Machines of a plan in waves, and the next step of a wave.

One wave is under way at a time. The next begins when the work on all machines of the one before
is over and they are healthy. Until then the plan pauses and names the machines that it waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from agent.api import Name
from control_plane.api.machines import EventKind
from control_plane.api.maintenance import (
    KIND,
    PART_MAX,
    Ends,
    MaintenanceRequest,
    PlanRecord,
    PlanView,
    WaveRecord,
    WaveState,
    WaveView,
    Within,
    Work,
)
from wire.errors import InvalidInput, some_of

_BY_REBOOT = (Work.KERNEL, Work.FIRMWARE)
_BY_EMPTY = (Work.REFRESH, Work.DECOMMISSION, Work.POWER_CAP)


@dataclass(frozen=True, slots=True)
class PlannedMachine:
    """A machine of a plan that is not divided into waves yet."""

    machine: str
    place: tuple[str, str, str, str]
    """Data center, MSB, row and rack."""
    priority: int = 0
    """The highest priority of its tasks: with `power-cap` the lowest goes first."""


@dataclass(frozen=True, slots=True)
class ObservedMachine:
    """A machine of a wave that is under way, as it is now."""

    is_open: bool
    """Whether the event that the plan announced for it has not ended."""
    is_well: bool
    """Whether it is up, its agent answers, and its host profile is verified."""
    tasks: int = 0
    """Tasks that must still leave it."""
    boot: str = ""
    power_w: int = 0
    is_held: bool = False
    """Whether it is assigned to an entitlement and must become free."""


class Stage:
    """What a machine of a wave waits for, as text."""

    DONE = "done"
    LEAVING = "its tasks to leave"
    WORK = "the work"
    BACK = "its return"


@dataclass(frozen=True, slots=True)
class WaveStep:
    """The next step of an announced wave."""

    close: tuple[str, ...] = ()
    """Machines whose event ends, because the work there is over."""
    finish: bool = False
    """Whether the wave is over."""
    waits: str = ""
    """Why the plan pauses; empty: it does not."""


def end_condition(request: MaintenanceRequest) -> Ends:
    """Return what shows that the work on a machine is over: a boot, a time, a report, …"""
    if request.ends is not None:
        return request.ends
    if request.work in _BY_REBOOT:
        return Ends.REBOOT
    if request.work in _BY_EMPTY:
        return Ends.EMPTY
    timed = request.deadline_s is not None and request.duration_s is not None
    return Ends.TIME if timed and request.tasks_survive else Ends.REPORTED


def divide_into_waves(
    machines: Iterable[PlannedMachine], request: MaintenanceRequest
) -> list[list[str]]:
    """Return the machines of each wave, in the order of the waves.

    A wave stays within one part of the region if the request asks for that. It spreads over the
    racks of this part, so that few machines of one rack are away together.
    """
    depth = 0 if request.within is None else _DEPTH[request.within]
    parts: dict[tuple[int | str, ...], list[PlannedMachine]] = {}
    for machine in machines:
        first = machine.priority if request.work is Work.POWER_CAP else 0
        parts.setdefault((first, *machine.place[:depth]), []).append(machine)
    size = request.wave_size or PART_MAX
    waves = []
    for key in sorted(parts):
        spread = _spread_over_racks(parts[key])
        waves += [spread[at : at + size] for at in range(0, len(spread), size)]
    return waves


def is_sequential(request: MaintenanceRequest) -> bool:
    """Return whether each wave waits for the one before; else waves only limit a record's size."""
    return bool(request.wave_size) or request.within is not None or request.work is Work.POWER_CAP


_DEPTH = {Within.DATACENTER: 1, Within.MSB: 2, Within.ROW: 3, Within.RACK: 4}


def _spread_over_racks(machines: Sequence[PlannedMachine]) -> list[str]:
    """Return the names in an order that takes one machine of each rack in turn."""
    racks: dict[tuple[str, ...], list[str]] = {}
    for machine in sorted(machines, key=lambda m: m.machine):
        racks.setdefault(machine.place, []).append(machine.machine)
    ranks = [(rank, rack, name) for rack in racks for rank, name in enumerate(racks[rack])]
    return [name for _, _, name in sorted(ranks)]


def _stage(machine: str, host: ObservedMachine | None, wave: WaveRecord, ends: Ends) -> str:
    """Return what a machine of a wave under way waits for; `host` None: the machine is gone."""
    if host is None or machine in wave.left_out:
        return Stage.DONE
    if ends is Ends.EMPTY:
        return Stage.LEAVING if host.is_open and (host.tasks or host.is_held) else Stage.DONE
    if not host.is_open:
        return Stage.DONE if host.is_well else Stage.BACK
    return Stage.LEAVING if host.tasks else Stage.WORK


def stages_of(wave: WaveRecord, hosts: Mapping[str, ObservedMachine], ends: Ends) -> dict[str, str]:
    """Return what each machine of a wave under way waits for."""
    return {name: _stage(name, hosts.get(name), wave, ends) for name in wave.machines}


def count_done(wave: WaveRecord, hosts: Mapping[str, ObservedMachine], ends: Ends) -> int:
    """Return on how many machines of a wave under way the work is over."""
    stages = stages_of(wave, hosts, ends)
    return sum(at == Stage.DONE for name, at in stages.items() if name not in wave.left_out)


def is_work_over(
    machine: str, host: ObservedMachine, wave: WaveRecord, plan: PlanRecord, now: float
) -> bool:
    """Return whether the work on a machine is observed to be over, so that its event may end."""
    if not host.is_open or not host.is_well:
        return False
    if plan.ends is Ends.REBOOT:
        return host.boot != wave.boots.get(machine, host.boot)
    return plan.ends is Ends.TIME and now >= _expected_end(wave, plan)


def advance(
    plan: PlanRecord, wave: WaveRecord, hosts: Mapping[str, ObservedMachine], now: float
) -> WaveStep:
    """Return the next step of an announced wave."""
    closing = tuple(
        name
        for name in wave.machines
        if (host := hosts.get(name)) is not None and is_work_over(name, host, wave, plan, now)
    )
    stages = stages_of(wave, hosts, plan.ends)
    late = [name for name, at in stages.items() if at != Stage.DONE and name not in closing]
    if not late:
        return WaveStep(close=closing, finish=not closing)
    if (
        plan.ends is not Ends.EMPTY
        and now >= _expected_end(wave, plan) + plan.request.return_within_s
    ):
        return WaveStep(close=closing, waits=_missing_text(late, wave))
    return WaveStep(close=closing)


def is_power_shed(
    plan: PlanRecord, waves: Iterable[WaveRecord], hosts: Mapping[str, ObservedMachine]
) -> bool:
    """Return whether the machines that are empty draw at least the power to be shed."""
    wanted = plan.request.shed_w
    if plan.request.work is not Work.POWER_CAP or not wanted:
        return False
    announced = [
        name for wave in waves if wave.state is not WaveState.WAITING for name in wave.machines
    ]
    empty = (hosts[name] for name in announced if name in hosts and not hosts[name].tasks)
    return sum(host.power_w for host in empty) >= wanted


def _expected_end(wave: WaveRecord, plan: PlanRecord) -> float:
    return wave.start + (plan.request.deadline_s or 0.0) + (plan.request.duration_s or 0.0)


def _missing_text(late: Sequence[str], wave: WaveRecord) -> str:
    count = f"{len(late)} of {len(wave.machines)} machines"
    return f"wave {wave.number}: {count} are not back: {some_of(late)}"


def check_request(request: MaintenanceRequest) -> None:
    """Raise `InvalidInput` for a contradictory request."""
    kind = KIND.get(request.work, EventKind.MAINTENANCE)
    if request.tasks_survive and kind is not EventKind.MAINTENANCE:
        raise InvalidInput(f"tasks do not survive a {request.work}")
    if request.tasks_survive and (request.deadline_s is None or request.duration_s is None):
        raise InvalidInput(
            "work that tasks survive needs a deadline and a duration: they bound the expected "
            "silence",
            hint="--deadline 10m --duration 3m",
        )
    if request.ends is Ends.TIME and (request.deadline_s is None or request.duration_s is None):
        raise InvalidInput("work that ends by time needs a deadline and a duration")
    if request.shed_w and request.work is not Work.POWER_CAP:
        raise InvalidInput(
            f"only power-cap sheds power, not {request.work}", hint="--work power-cap"
        )
    if request.ends is Ends.EMPTY and request.tasks_survive:
        raise InvalidInput("work that tasks survive cannot end when they are gone")


def check_name(name: str) -> None:
    """Raise `InvalidInput` for a name that a plan cannot have."""
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError as e:
        raise InvalidInput(
            f"{name!r} is not a valid name of a plan: a-z, 0-9 and -, at most 63 characters"
        ) from e


def waves_away_together(request: MaintenanceRequest, waves: int) -> list[list[int]]:
    """Return the numbers of waves whose machines are away together: all, or one at a time."""
    if is_sequential(request) and end_condition(request) is not Ends.EMPTY:
        return [[number] for number in range(waves)]
    return [list(range(waves))]


def plan_view(
    plan: PlanRecord, waves: Sequence[WaveRecord], hosts: Mapping[str, ObservedMachine], now: float
) -> PlanView:
    """Return a plan with all its waves."""
    views = [_wave_view(plan, wave, hosts, now) for wave in waves]
    return PlanView(plan=plan, done=sum(view.done for view in views), waves=views)


def _wave_view(
    plan: PlanRecord, wave: WaveRecord, hosts: Mapping[str, ObservedMachine], now: float
) -> WaveView:
    count, ready, done = len(wave.machines), list[str](), 0
    waiting: dict[str, int] = {}
    if wave.state is WaveState.DONE:
        done = count - len(wave.left_out)
    elif wave.state is WaveState.CANCELLED:
        done = wave.done
    elif wave.state is WaveState.ANNOUNCED:
        stages = stages_of(wave, hosts, plan.ends)
        done = count_done(wave, hosts, plan.ends)
        waiting = dict(sorted(Counter(at for at in stages.values() if at != Stage.DONE).items()))
        if wave.start <= now:
            ready = [name for name, at in stages.items() if at == Stage.WORK]
    deadline_s = plan.request.deadline_s
    began = wave.state is not WaveState.WAITING and wave.start > 0
    return WaveView(
        number=wave.number,
        state=wave.state,
        machines=count,
        done=done,
        left_out=len(wave.left_out),
        waiting=waiting,
        ready=ready,
        start=wave.start if began else None,
        deadline=wave.start + deadline_s if began and deadline_s is not None else None,
    )
