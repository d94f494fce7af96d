"""What a plan would do to jobs, computed before the plan is accepted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from control_plane.api.maintenance import Held, JobImpact
from wire.errors import some_of

LARGE_SHARE = 0.25
"""A wave with a larger share of the region's machines needs an override: a quarter of a data
center is the largest refresh in the paper (§5.1)."""
_HELD_MAX = 100


@dataclass(slots=True)
class AffectedJob:
    """A job that has tasks on machines of a plan."""

    job: str
    entitlement: str
    tasks: int
    down: int
    budget: int
    controller: str = ""
    tasks_by_wave: list[set[int]] = field(default_factory=list)
    """Its tasks on the machines of each wave."""
    not_serving: set[int] = field(default_factory=set)
    """Tasks on these machines that do not serve now: losing them costs no budget."""
    unplaced: int = 0
    reasons: list[str] = field(default_factory=list)

    def impact(self, *, stay: bool) -> JobImpact:
        """Return what the plan does to the job; `stay`: tasks survive the work."""
        serving = [len(tasks - self.not_serving) for tasks in self.tasks_by_wave]
        most = max(serving, default=0)
        return JobImpact(
            job=self.job,
            entitlement=self.entitlement,
            there=sum(map(len, self.tasks_by_wave)),
            tasks=self.tasks,
            down=self.down,
            budget=self.budget,
            most_in_a_wave=most,
            rounds=-(-most // max(1, self.budget)),
            controller=self.controller,
            stay=stay and bool(self.controller),
            unplaced=self.unplaced,
            reasons=self.reasons,
        )


def within_budgets(
    wave: Sequence[str],
    serving_on: Mapping[str, Mapping[str, int]],
    jobs: Mapping[str, AffectedJob],
) -> tuple[int, list[Held]]:
    """Return how many machines the budgets of all jobs allow at once, and what holds the others.

    `serving_on` is machine → job → serving tasks there. For example, a machine waits if it has the
    second replica of a job whose first replica is down (HC6).
    """
    left = {name: job.budget - job.down for name, job in jobs.items()}
    held, at_once = list[Held](), 0
    for machine in wave:
        needs = {job: number for job, number in serving_on.get(machine, {}).items() if number}
        lacking = sorted(job for job, number in needs.items() if left[job] < number)
        if lacking:
            held.append(Held(machine=machine, jobs=lacking))
            continue
        at_once += 1
        for job, number in needs.items():
            left[job] -= number
    return at_once, held[:_HELD_MAX]


def warnings(
    impacts: Iterable[JobImpact], share: float, *, has_deadline: bool, tasks_survive: bool
) -> list[str]:
    """Return why a plan is refused unless its operator overrides it."""
    texts = []
    if share > LARGE_SHARE:
        texts.append(f"a wave takes {share:.0%} of the region's machines at once")
    if tasks_survive:
        return texts
    for impact in impacts:
        if impact.unplaced:
            why = "; ".join(impact.reasons)
            end = "they stop at the deadline" if has_deadline else "their machines wait for them"
            texts.append(
                f"job {impact.job}: {impact.unplaced} of {impact.there} tasks have no other "
                f"machine, {end}: {why}"
            )
    return texts


def impact_order(impact: JobImpact) -> tuple[float, str]:
    """Return a job's sort key in a preview: the largest loss relative to its budget is first."""
    return -(impact.most_in_a_wave + impact.down) / max(1, impact.budget), impact.job


def overlaps(machines: Mapping[str, Sequence[str]], jobs: Mapping[str, Sequence[str]]) -> list[str]:
    """Describe the overlaps with other work: `machines` and `jobs` that it shares, by its name."""
    texts = []
    for plan, shared in sorted(machines.items()):
        texts.append(
            f"{plan}: it also has {len(shared)} of these machines ({some_of(sorted(shared))}); "
            "tasks leave once, by the earlier deadline"
        )
    for plan, shared in sorted(jobs.items()):
        names = some_of(sorted(shared))
        texts.append(f"{plan}: takes machines of the same jobs: {names}; one budget is for both")
    return texts
