"""How long does it take to compose the intents of one job into a specification?

    python -m tests.bench.intents [--json]

Goals: 20 ms of CPU time for a job of 15,000 tasks, 0.3 ms for one of 100. The bench measures a
composition without a change, the start of a push, the start of a canary, and a smaller size.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from control_plane.api.intents import CanaryIntent, SizeIntent
from control_plane.job_control.core.compose import (
    Infrastructure,
    JobWants,
    Pushed,
    TaskSeen,
    compose,
)

GOALS_MS = {100: 0.3, 15_000: 20.0}
ROUNDS = 7
NOW = 1.8e9


def best_ms(work: Callable[[], object], times: int) -> float:
    """Return the CPU time of one call, the least of some rounds, in milliseconds."""
    found = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - began) / times)
    return min(found) * 1e3


def measured(size: int) -> dict[str, float]:
    """Return the cost of each composition for a job of `size` tasks."""
    before = [TaskSeen(index, 1, rank=index % 7) for index in range(size)]
    half = [TaskSeen(index, 1 + index % 2, rank=index % 7) for index in range(size)]
    where = Infrastructure({index: f"t{index % 3}" for index in range(size)})
    push, canary = Pushed(2, 1, 0.5), CanaryIntent(version=3, share=0.02)
    of_now, less = SizeIntent(tasks=size), SizeIntent(tasks=size // 2)
    cases = {
        "steady": (JobWants(push, of_now), half),
        "push": (JobWants(push, of_now), before),
        "canary": (JobWants(push, of_now, canary), half),
        "smaller": (JobWants(push, less, canary), half),
    }
    times = max(1, 2_000 // size)
    return {
        f"{name}_ms_{size}": round(best_ms(lambda w=w, t=t: compose(w, t, where, NOW), times), 3)
        for name, (w, t) in cases.items()
    }


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measured(100) | measured(15_000)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:24} {value:8} (at most {GOALS_MS[int(name.rpartition('_')[2])]})")


if __name__ == "__main__":
    main()
