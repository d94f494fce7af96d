"""The sizing rules that `autoscale` compares with ours, and the traces that it replays."""

from __future__ import annotations

import gzip
import importlib.util
import math
import random
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path

from control_plane.autoscaler.core.replay import Rule

DATA = Path(__file__).resolve().parent / "data"
WEEK_S, DAY_S, SLOT_S = 604_800.0, 86_400.0, 300.0
PEAK_TASKS = 100.0
"""Every trace is scaled so that its 99.5th percentile is the load of this number of tasks."""
Points = list[tuple[float, float]]
Make = Callable[[float], Rule]
"""Makes a rule that multiplies its expected load by a factor."""


def traces() -> dict[str, Points]:
    """Return the real traces by name, each as points of time and load, in tasks."""
    return {path.name.split(".")[0]: _scaled(_read(path)) for path in sorted(DATA.glob("*.txt.gz"))}


def _read(path: Path) -> Points:
    head, *lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    words = head.replace(",", "").split()
    first, step = int(words[words.index("slot") + 1]), float(words[-3])
    return [((first + i) * step, float(text)) for i, text in enumerate(lines) if text]


def _scaled(points: Points) -> Points:
    ordered = sorted(load for _, load in points)
    peak = ordered[int(0.995 * (len(ordered) - 1))]
    return [(at, load * PEAK_TASKS / peak) for at, load in points]


def generated() -> dict[str, Points]:
    """Return three generated loads of four weeks: quiet days, noisy days, a sudden week."""
    return {
        "diurnal": diurnal(28, 0.02, 1),
        "diurnal-noisy": diurnal(28, 0.15, 2),
        "sudden-week": [
            (at, load * (1.8 if 19 <= (at - points_0) / DAY_S < 26 else 1.0))
            for points_0 in (diurnal(1, 0, 3)[0][0],)
            for at, load in diurnal(28, 0.05, 3)
        ],
    }


def diurnal(days: int, noise: float, seed: int) -> Points:
    """Return a load with a daily and a weekly cycle: 100 tasks at the peak, 45 at night, less on
    Sundays.
    """
    chance, start = random.Random(seed), 20_000 * DAY_S
    found = []
    for slot in range(days * 288):
        at = start + slot * SLOT_S
        hour = slot / 12 % 24
        day = 72.5 - 27.5 * math.cos((hour - 4) / 24 * 2 * math.pi)
        week = 0.8 if int(at // DAY_S) % 7 in (2, 3) else 1.0
        found.append((at, max(0.0, day * week * (1 + noise * chance.gauss(0, 1)))))
    return found


def naive(factor: float) -> Rule:
    """Return the rule that sets the size by the present load."""

    def rule(at: float, load: float | None, size: int, healthy: int) -> int:
        return size if load is None else max(1, math.ceil(load * factor - 1e-6))

    return rule


def last_week(factor: float) -> Rule:
    """Return the rule that sets the size by the highest load of the next ten minutes a week ago.

    In the first week it uses the present load.
    """
    known: dict[int, float] = {}

    def rule(at: float, load: float | None, size: int, healthy: int) -> int:
        slot = int(at // SLOT_S)
        if load is not None:
            known[slot] = max(load, known.get(slot, 0.0))
        then = int((at - WEEK_S) // SLOT_S)
        ahead = [known[s] for s in (then, then + 1, then + 2) if s in known]
        if not ahead:
            ahead = [load] if load is not None else []
        return max(1, math.ceil(max(ahead) * factor - 1e-6)) if ahead else size

    return rule


def hpa(factor: float) -> Rule:
    """Return the rule of Kubernetes' HorizontalPodAutoscaler at its defaults.

    ceil(size * metric / target), no change within 10 %; up by 100 % or 4 tasks in 15 s, down to the
    highest recommendation of the last 300 s. Evaluated each minute rather than each 15 s.
    """
    recent: deque[tuple[float, int]] = deque()

    def rule(at: float, load: float | None, size: int, healthy: int) -> int:
        if load is None:
            return size
        ratio = load * factor / max(1, healthy)
        wanted = size if abs(ratio - 1) <= 0.1 else max(1, math.ceil(load * factor - 1e-6))
        recent.append((at, wanted))
        while recent[0][0] < at - 300:
            recent.popleft()
        if wanted > size:
            return min(wanted, max(size * 16, size + 16))
        return min(size, max(tasks for _, tasks in recent))

    return rule


def library() -> Make | None:
    """Return the rule by Holt and Winters' method of statsmodels, None where it is not installed.

    The model is fitted each day at midnight on up to 14 days of half hours. The size is that for
    the coming half hour, or for the present load if that is higher.
    """
    if importlib.util.find_spec("statsmodels") is None:
        return None
    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    fits: dict[tuple[float, ...], list[float]] = {}
    """Cached fits by their input; they do not depend on the factor."""

    def make(factor: float) -> Rule:
        halves: dict[int, float] = {}
        ahead: dict[int, float] = {}
        fitted_on = [0]

        def fit(half: int) -> None:
            numbers = range(half - 14 * 48, half)
            series = [halves[n] for n in numbers if n in halves]
            if len(series) < 2 * 48:
                return
            if tuple(series) not in fits:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model = ExponentialSmoothing(series, seasonal="add", seasonal_periods=48)
                    fits[tuple(series)] = [float(v) for v in model.fit().forecast(49)]
            ahead.update({half + i: v for i, v in enumerate(fits[tuple(series)])})

        def rule(at: float, load: float | None, size: int, healthy: int) -> int:
            half, day = int(at // 1800), int(at // DAY_S)
            if load is not None:
                halves[half] = max(load, halves.get(half, 0.0))
            if day != fitted_on[0]:
                fitted_on[0] = day
                fit(half)
            soon = [ahead[h] for h in (half, half + 1) if h in ahead]
            known = [*soon, *([] if load is None else [load])]
            return max(1, math.ceil(max(known) * factor - 1e-6)) if known else size

        return rule

    return make
