"""The figures 4, 6, 7 and 8 of the article on the job control plane, in the simulated region.

    python -m tests.bench.intent_figures [--figure 4|6|7|8] [--jobs 200] [--out FOLDER] [--json]

The production control plane on virtual time (scenarios `figure-6`, `figure-7`, `figure-8`).

- Figure 6: 100 tasks, a push to half of them, a canary of two, then 50 and 75 tasks. The bench
  prints the tasks of each version after each step. Figure 4 is the same story with the old way
  instead of composition: the first 50 tasks are updated, and a smaller job keeps the first.
- Figure 7: stages of 10 %, 50 % and 100 %; operators roll out a runtime before the last stage. The
  bench prints the tasks of the first push with the new runtime; the old way asks at each update.
- Figure 8: jobs of one task that must serve all the time. All get a new version at once, then all
  machines a new kernel. There is a run with two tasks for each job, and one with a single task and
  a buffer of extra tasks. The bench prints the most machines held, the saving, the fewest jobs that
  served, and the duration of the push. The article states a saving of 30 %.

The folder gets the curves as SVG.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec.structs import replace

from agent.api import Health
from control_plane.api.jobs import JobRecord, JobSpec
from control_plane.job_control.core.compose import (
    Assigned,
    Infrastructure,
    JobWants,
    TaskSeen,
    UnifiedSpec,
    Why,
    compose,
    part_of,
)
from control_plane.scheduler.core import assignment, job_change
from vm_lab.region import scenario
from vm_lab.region.machine import Copy
from vm_lab.region.scenario import Scenario
from vm_lab.region.seed import SimulatedRegion
from vm_lab.region.story import Fault, draw

STEP_S = 5.0
PUSHED_AT_ONCE = 100
"""Number of tasks for the old way when its push began."""
BUFFERS = (0.1, 0.2, 0.4)
"""Extra tasks at once, as shares of the jobs."""
COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#7b3294", "#b35806")
Count = Callable[[SimulatedRegion], Counter[str]]


class Course:
    """Runs one scenario, and counts its tasks all the time."""

    def __init__(self, chosen: Scenario, count: Count, story: Sequence[Fault] = ()) -> None:
        """Run the first seed of the scenario, with the faults of `story` in addition."""
        self.region, self._count = SimulatedRegion(chosen, 1), count
        self.samples: list[tuple[float, Counter[str]]] = []
        """Seconds since the story began, and counts by kind."""
        self.region.timeline.after(STEP_S, self._sample)
        silenced = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            self.region.run(sorted([*draw(chosen, 1), *story], key=lambda f: (f.at, str(f))))
        finally:
            logging.disable(silenced)
        self.broken = sorted({v.rule for v in self.region.checker.violations})

    def at(self, seconds: float) -> dict[str, int]:
        """Return the counts at this time of the story."""
        found = [counts for at, counts in self.samples if at <= seconds]
        return dict(found[-1])

    def _sample(self) -> None:
        if self.region.story_at:
            at = self.region.timeline.now - self.region.story_at
            self.samples.append((at, self._count(self.region)))
        self.region.timeline.after(STEP_S, self._sample)


def alive(region: SimulatedRegion) -> Iterator[Copy]:
    """Yield the tasks that run anywhere."""
    return (c for m in region.machines.values() for c in m.copies.values() if c.alive)


# -- figures 4 and 6


def versions(region: SimulatedRegion) -> Counter[str]:
    """Return the tasks that are `old`, `pushed` or `canary`, by the number in the image's name."""
    numbers = (int(copy.running_image[11:15], 16) for copy in alive(region))
    return Counter("canary" if n >= 0x8000 else "pushed" if n else "old" for n in numbers)


def first_tasks(
    wanted: JobWants, tasks: Sequence[TaskSeen], infrastructure: Infrastructure, now: float
) -> UnifiedSpec:
    """Return what task overrides would give: a push to the first tasks; the last ones are removed
    first.
    """
    push, size = wanted.push, wanted.size.wanted
    if not push.stable:
        return compose(wanted, tasks, infrastructure, now)
    staying = sorted(task.index for task in tasks)[:size]
    new = [i for i in range(size) if i not in {t.index for t in tasks}][: size - len(staying)]
    first = part_of(push.share, PUSHED_AT_ONCE) if push.share < 1.0 else size
    spec = {
        index: Assigned(push.target, Why.PUSH)
        if index < first
        else Assigned(push.stable, Why.STABLE)
        for index in (*staying, *new)
    }
    removed = frozenset(task.index for task in tasks) - frozenset(staying)
    return UnifiedSpec(size, spec, removed, push.runtime)


def half_of_a_push(*, old_way: bool = False) -> Course:
    """Return figure 6, or figure 4."""
    way = first_tasks if old_way else compose
    with mock.patch.object(assignment, "compose", way):
        return Course(scenario.load("figure-6"), versions)


def sizes_of(course: Course) -> dict[str, dict[str, int]]:
    """Return the tasks by version when each step of the story was done."""
    steps = {
        "pushed": 590,
        "with a canary": 890,
        "of 50": 1190,
        "of 75": 1790,
        "without": 1990,
        "all": 2390,
    }
    return {name: course.at(at) for name, at in steps.items()}


# -- figure 7


def runtimes(region: SimulatedRegion) -> Counter[str]:
    """Return the tasks by the push that they run, and by their runtime."""
    pushes = {0: "before", 0x1001: "first push"}
    return Counter(
        f"{pushes.get(int(copy.running_image[11:15], 16), 'second push')},"
        f" {copy.spec.environment.get('TWINE_RUNTIME', 'old runtime')}"
        for copy in alive(region)
    )


@contextmanager
def newest_runtime_at_each_update() -> Iterator[None]:
    """Let each write of a push take the newest runtime, as each update did in the old way."""
    changed = job_change._with_spec

    def entering(record: JobRecord, spec: JobSpec) -> JobRecord:
        after = changed(record, spec)
        newest = job_change._with_runtime(after, after.spec)
        return replace(after, spec=newest, specs=after.specs | {after.version: newest})

    with mock.patch.object(job_change, "_with_spec", entering):
        yield


def a_runtime_rolled_out(*, old_way: bool = False) -> Course:
    """Return figure 7, or the same in the old way."""
    if not old_way:
        return Course(scenario.load("figure-7"), runtimes)
    with newest_runtime_at_each_update():
        return Course(scenario.load("figure-7"), runtimes)


def untested(course: Course) -> int:
    """Return the most tasks of the first push that ran a runtime which no stage had tried."""
    return max(counts["first push, r3"] for _, counts in course.samples)


# -- figure 8


def serving(region: SimulatedRegion) -> Counter[str]:
    """Return the number of jobs that serve, all tasks, the old ones, and machines held."""
    copies = list(alive(region))
    well = {c.task_id.rpartition("-")[0] for c in copies if c.health is Health.HEALTHY}
    held = sum(1 for checked in region.checker.machines.values() if checked.entitlement)
    old = sum(1 for copy in copies if not int(copy.running_image[11:15], 16))
    return Counter({"serving": len(well), "tasks": len(copies), "old": old, "machines": held})


def models(jobs: int, *, tasks: int, buffer: int) -> Course:
    """Run jobs of `tasks` tasks with a shared buffer of `buffer` extra ones."""
    chosen = scenario.load("figure-8")
    # a machine has room for seven tasks; some machines are away while the kernel is changed
    spare = 1.15 + buffer / jobs
    work = replace(chosen.work, jobs=jobs, tasks=(tasks, tasks), surge_tasks=buffer, spare=spare)
    shape = replace(chosen.shape, machines=max(16, jobs // 2))
    push = [Fault(60.0, "release", f"job:job{number}") for number in range(jobs)]
    return Course(replace(chosen, work=work, shape=shape), serving, push)


def figures_of(course: Course, jobs: int) -> dict[str, float]:
    """Return the figures of one way of running the jobs."""
    counts = [c for _, c in course.samples]
    pushed = [at for at, c in course.samples if at >= 60.0 and not c["old"]]
    return {
        "tasks_usual": counts[0]["tasks"],
        "tasks_most": max(c["tasks"] for c in counts),
        "machines_most": max(c["machines"] for c in counts),
        "jobs_serving_least": min(c["serving"] for c in counts),
        "push_s": round(pushed[0] - 60.0) if pushed else -1,
    }


# -- pictures


def svg_of(title: str, course: Course, kinds: Sequence[str]) -> str:
    """Return the curves of some kinds."""
    width, height, left, top = 900, 300, 60, 50
    end = course.samples[-1][0]
    most = max(max(counts[kind] for kind in kinds) for _, counts in course.samples) or 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 90}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height + 90}" fill="white"/>',
        f'<text x="{left}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for part in range(5):
        y = top + height - height * part / 4
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y}" y2="{y}" stroke="#eee"/>')
        parts.append(
            f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{most * part / 4:g}</text>'
        )
        at = end * part / 4
        x = left + (width - 20 - left) * part / 4
        parts.append(
            f'<text x="{x}" y="{top + height + 18}" text-anchor="middle">{at / 60:.0f} min</text>'
        )
    for number, kind in enumerate(kinds):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{left + (width - 20 - left) * at / end:.1f},{top + height * (1 - c[kind] / most):.1f}"
            for at, c in course.samples
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        x = left + number * 165
        parts.append(f'<text x="{x}" y="{top + height + 45}" fill="{colour}">{escape(kind)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def drawn(out: Path | None, name: str, title: str, course: Course, kinds: Sequence[str]) -> None:
    """Write a picture, if a folder is given."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.svg").write_text(svg_of(title, course, kinds))


def main() -> None:
    """Run the requested figures, and print their numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=int, choices=(4, 6, 7, 8), action="append")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, object] = {}
    chosen = options.figure or [4, 6, 7, 8]
    for number in {4, 6} & set(chosen):
        course = half_of_a_push(old_way=number == 4)
        figures[f"figure_{number}"] = sizes_of(course)
        title = "The first 50 tasks are updated" if number == 4 else "Half of the job is updated"
        drawn(options.out, f"figure-{number}", title, course, ("old", "pushed", "canary"))
    for old_way in (True, False) if 7 in chosen else ():
        course = a_runtime_rolled_out(old_way=old_way)
        name = "figure_7_old_way" if old_way else "figure_7"
        figures[name] = {"untried_tasks": untested(course)}
        kinds = sorted({kind for _, counts in course.samples for kind in counts})
        drawn(options.out, name.replace("_", "-"), "Pushes and runtimes", course, kinds)
    if 8 in chosen:
        figures["figure_8"] = _models(options.jobs, options.out)
    if options.json:
        print(json.dumps(dict(_flat(figures))))
    else:
        for figure, found in figures.items():
            print(f"{figure}: {json.dumps(found, indent=2)}")


def _flat(found: dict[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number with its full path."""
    for key, value in found.items():
        name = f"{before}{key}".replace(" ", "_")
        if isinstance(value, dict):
            yield from _flat(value, f"{name}_")
        else:
            yield name, value


def _models(jobs: int, out: Path | None) -> dict[str, dict[str, float]]:
    ways = {"two_tasks": (2, 0), "one_task": (1, 0)}
    ways |= {f"buffer_{share:.0%}": (1, round(jobs * share)) for share in BUFFERS}
    found = dict[str, dict[str, float]]()
    for name, (tasks, buffer) in ways.items():
        course = models(jobs, tasks=tasks, buffer=buffer)
        found[name] = figures_of(course, jobs)
        both = found["two_tasks"]
        found[name]["saved_tasks"] = round(1 - found[name]["tasks_most"] / both["tasks_most"], 3)
        found[name]["saved_machines"] = round(
            1 - found[name]["machines_most"] / both["machines_most"], 3
        )
        title = f"{jobs} jobs: {tasks} tasks each, {buffer} extra for all"
        kinds = ("tasks", "serving", "machines")
        drawn(out, f"figure-8-{name.replace('_', '-').strip('%')}", title, course, kinds)
    return found


if __name__ == "__main__":
    main()
