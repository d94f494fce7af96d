"""Computes how long switches took, by kind of setting, from the latest reports of hosts (HP4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import ceil

from agent.api import ProfileStatus, SettingOutcome
from control_plane.api.profiles import ProfileStats, SettingTimes

_WRITTEN = (SettingOutcome.APPLIED, SettingOutcome.PENDING_REBOOT)
ALL = "(whole switch)"


def stats_of(reports: Iterable[ProfileStatus]) -> ProfileStats:
    """Return the times of settings written in machines' last switches, without rolled-back ones."""
    times: dict[str, list[float]] = defaultdict(list)
    machines = 0
    for report in reports:
        machines += 1
        switch = report.switched
        if switch is None or switch.rolled_back:
            continue
        by_kind: dict[str, float] = defaultdict(float)
        for setting in switch.settings:
            if setting.outcome in _WRITTEN and setting.took_ms > 0:
                by_kind[setting.setting.partition(".")[0]] += setting.took_ms
        for kind, took_ms in by_kind.items():
            times[kind].append(took_ms)
        if by_kind and switch.took_ms > 0:
            times[ALL].append(switch.took_ms)
    rows = [
        SettingTimes(
            setting=kind,
            switches=len(values),
            p50_ms=quantile(values, 0.5),
            p90_ms=quantile(values, 0.9),
        )
        for kind, values in times.items()
    ]
    rows.sort(key=lambda row: (row.setting == ALL, row.p90_ms, row.setting))
    return ProfileStats(machines=machines, settings=rows)


def quantile(values: list[float], part: float) -> float:
    """Return the smallest value that at least `part` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, ceil(part * len(ordered)) - 1)]
