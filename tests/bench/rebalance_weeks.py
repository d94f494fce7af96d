"""Weeks of a region with and without the ReBalancer: hot machines, moves, and moves back.

    python -m tests.bench.rebalance_weeks [--json] [--svg FILE] [--days 14] [--machines 200]

Loads are noisy and follow the day, with a separate peak for each job; 1 % of the tasks is replaced
each hour, and a machine in fifty fails each day for four hours. A step is one plan (ten minutes).
Plans use smoothed loads; hot machines are counted by true ones. Moves have the production limit (60
in ten minutes), and a task that moved rests for four hours. Tasks are placed and replaced by claims
alone, where there is most room, because the allocator knows no loads.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from control_plane.rebalancer.core.model import FLOAT, RegionModel, packed
from control_plane.rebalancer.core.ordering import ordered
from control_plane.rebalancer.core.region_state import RegionState
from control_plane.rebalancer.core.search import LocalSearch
from tests.rebalancer_models import a_model

STEP_S, REST_S, SETTLE_S, SMOOTH_S = 600.0, 14_400.0, 600.0, 600.0
MOVES = 60
"""Moves in one step: `moves_per_s` of 0.1."""
_HOT = 0.8
_DAY_S = 86_400.0


@dataclass
class Weeks:
    """One region through its days."""

    model: RegionModel
    is_on: bool
    seed: int
    hot: list[int] = field(default_factory=list)
    """Number of machines above 80 % of a dimension, by step."""
    worst: list[float] = field(default_factory=list)
    """The greatest used share of any machine, by step."""
    moves: Counter[int] = field(default_factory=Counter)
    """Task → its moves."""
    returned: int = 0
    """Moves of a task back to a machine that it left less than a day before."""
    broken: int = 0
    """Moves that came within the rest period after the move before."""

    def __post_init__(self) -> None:
        """Draw the use of each task, and its daily cycle."""
        self._chance = np.random.default_rng(self.seed)
        state = RegionState(self.model)
        self._base = state.load.copy()
        jobs = len(self.model.jobs)
        self._peak = self._chance.uniform(0, _DAY_S, jobs)[state.job]
        self._swing = self._chance.uniform(0.1, 0.6, jobs)[state.job]
        self._skew = self._chance.lognormal(0.0, 0.5, len(state.where))
        self._seen = self._base.copy()
        self._moved_at = np.full(len(state.where), -np.inf)
        self._began_at = np.full(len(state.where), -np.inf)
        self._left: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._down: dict[int, float] = {}

    def run(self, days: float) -> None:
        """Simulate some days."""
        for step in range(int(days * _DAY_S / STEP_S)):
            self._live(step * STEP_S)

    def _live(self, now: float) -> None:
        true = self._loads(now)
        weight = 1.0 - np.exp(-STEP_S / SMOOTH_S)
        self._seen += weight * (true - self._seen)
        self._fail_and_replace(now)
        if self.is_on:
            self._rebalance(now)
        state = self._state(true)
        self.hot.append(state.count_hot())
        self.worst.append(float((state.used * state.per_size).max()))

    def _loads(self, now: float) -> np.ndarray:
        day = 1.0 + self._swing * np.cos(2 * np.pi * (now - self._peak) / _DAY_S)
        noise = self._chance.lognormal(0.0, 0.15, len(day))
        found = self._base * (day * noise * self._skew)[:, None]
        found[:, 1] = self._base[:, 1]  # memory does not follow the day
        return np.asarray(found)

    def _state(self, loads: np.ndarray, can_move: np.ndarray | None = None) -> RegionState:
        tasks = replace(self.model.tasks, load=packed(FLOAT, loads.ravel()))
        if can_move is not None:
            tasks = replace(tasks, can_move=can_move.astype(np.uint8).tobytes())
        up = [m not in self._down for m in range(len(self.model.machines))]
        return RegionState(replace(self.model, tasks=tasks, is_open=up))

    def _keep(self, state: RegionState) -> None:
        where = state.where.astype(np.int32).tobytes()
        room = [tuple(room) for room in state.room.tolist()]
        tasks = replace(self.model.tasks, machine=where)
        self.model = replace(self.model, tasks=tasks, room_cpu=state.room_cpu.tolist(), room=room)

    def _fail_and_replace(self, now: float) -> None:
        """Let machines fail and come back, and replace tasks by claims alone."""
        self._down = {m: until for m, until in self._down.items() if until > now}
        machines, tasks = len(self.model.machines), len(self._base)
        gone = self._chance.random(machines) < STEP_S / _DAY_S / 50
        for machine in np.nonzero(gone)[0].tolist():
            self._down[machine] = now + 4 * 3600.0
        state = self._state(self._seen)
        lost = [task for machine in self._down for task in state.tasks_on[machine]]
        born = np.nonzero(self._chance.random(tasks) < 0.01 * STEP_S / 3600.0)[0].tolist()
        for task in dict.fromkeys([*lost, *born]):
            ok = state.fits(state.kind[task : task + 1], np.arange(machines))[0]
            ok &= state.pool == state.pool[state.where[task]]
            ok[state.where[task]] = False
            fitting = np.nonzero(ok)[0]
            if len(fitting):
                state.move(task, int(fitting[state.room_cpu[fitting].argmax()]))
            self._began_at[task] = now
            if task not in lost:
                self._skew[task] = self._chance.lognormal(0.0, 0.5)
                self._seen[task] = self._base[task]
        self._keep(state)

    def _rebalance(self, now: float) -> None:
        rests = now - self._moved_at < REST_S
        settles = now - self._began_at < SETTLE_S
        state = self._state(self._seen, ~(rests | settles))
        search = LocalSearch(state.copy(), seed=1, most_moves=MOVES)
        search.run(lambda: search.steps < 2_000)
        for task, _ in search.moves:
            at = int(state.where[task])
            self._left[task][at] = now
        moves = list(search.moves)
        ordered(state, moves)
        for task, to in moves:
            self.moves[task] += 1
            self.broken += now - float(self._moved_at[task]) < REST_S
            self.returned += now - self._left[task].get(to, -np.inf) < _DAY_S
            self._moved_at[task] = now
        self._keep(state)


def figures(machines: int, days: float, seed: int = 1, busy: float = 1.0) -> dict[str, Any]:
    """Return both regions' figures; tasks use `busy` times their usual load."""
    model = a_model(seed, machines, 16 * machines, pinned=False, busy=busy)
    with_it, without = Weeks(model, True, seed), Weeks(model, False, seed)
    for one in (with_it, without):
        one.run(days)
    tasks, weeks = 16 * machines, days / 7
    return {
        "machines": machines,
        "tasks": tasks,
        "days": days,
        "hot_without": round(float(np.mean(without.hot)), 2),
        "hot_with": round(float(np.mean(with_it.hot)), 2),
        "hot_with_after_day_1": round(float(np.mean(with_it.hot[144:] or [0])), 2),
        "moves_per_task_and_week": round(with_it.moves.total() / tasks / weeks, 3),
        "most_moves_of_a_task": max(with_it.moves.values(), default=0),
        "returned_within_a_day": with_it.returned,
        "moves_before_their_rest": with_it.broken,
        "series": {"with": with_it.hot, "without": without.hot},
    }


def picture(found: dict[str, Any]) -> str:
    """Return hot machines over time as SVG, with and without the ReBalancer."""
    series, wide, high = found["series"], 900, 260
    most = max(1, *series["with"], *series["without"])
    lines = []
    for name, colour in (("without", "#c62828"), ("with", "#1565c0")):
        points = " ".join(
            f"{50 + wide * at / len(series[name]):.1f},{20 + high * (1 - hot / most):.1f}"
            for at, hot in enumerate(series[name])
        )
        lines.append(f'<polyline fill="none" stroke="{colour}" points="{points}"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide + 60} {high + 50}"'
        ' font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="4" y="14">machines above 80 % of {found["machines"]}, {found["days"]} days;'
        " red: without the ReBalancer, blue: with it</text>"
        f'<text x="4" y="30">{most}</text><text x="4" y="{20 + high}">0</text>'
        + "".join(lines)
        + "</svg>\n"
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--days", type=float, default=14.0)
    parser.add_argument("--machines", type=int, default=200)
    options = parser.parse_args()
    found = figures(options.machines, options.days)
    if options.svg is not None:
        options.svg.write_text(picture(found))
    del found["series"]
    print(json.dumps(found) if options.json else "\n".join(f"{k:26} {v}" for k, v in found.items()))


if __name__ == "__main__":
    main()
