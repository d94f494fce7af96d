"""A plan as people see it: how far each wave is, and what its machines wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from control_plane.api.maintenance import PlanRecord, PlanView, WaveRecord, WaveState, WaveView
from control_plane.ops_planner.core.waves import SeenHost, Stage, stage


def plan_view(
    plan: PlanRecord, waves: Sequence[WaveRecord], hosts: Mapping[str, SeenHost], now: float
) -> PlanView:
    """Return a plan with all its waves."""
    views = [_wave_view(plan, wave, hosts, now) for wave in waves]
    return PlanView(plan=plan, done=sum(view.done for view in views), waves=views)


def _wave_view(
    plan: PlanRecord, wave: WaveRecord, hosts: Mapping[str, SeenHost], now: float
) -> WaveView:
    count, ready, done = len(wave.machines), list[str](), 0
    waiting: dict[str, int] = {}
    if wave.state is WaveState.DONE:
        done = count - len(wave.left_out)
    elif wave.state is WaveState.ANNOUNCED:
        stages = {name: stage(name, hosts.get(name), wave, plan.ends) for name in wave.machines}
        left_out = set(wave.left_out)
        done = sum(at == Stage.DONE and name not in left_out for name, at in stages.items())
        waiting = dict(sorted(Counter(at for at in stages.values() if at != Stage.DONE).items()))
        if wave.start <= now:
            ready = [name for name, at in stages.items() if at == Stage.WORK]
    deadline_s = plan.wish.deadline_s
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
