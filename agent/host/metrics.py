"""Metrics of the agent (`/metrics`): the host, its tasks, and counters of the agent.

Values are read during the scrape, in the `usage` thread; nothing is kept between scrapes. Labels
name only tasks of this host, and disappear with the task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agent.api import Health, TaskSpec, TaskState, TaskStatus
from agent.images.images import HostImages
from agent.images.published import IMAGE_FILES
from agent.machine import Cgroups, Usage
from agent.runtime.disk import ANSWER_S, StateDisk
from agent.runtime.offload import Lanes, PatientCall
from agent.tasks.prober import Prober
from agent.tasks.queries import TaskQueries
from agent.usage import TaskUsage, Usages
from wire.process_metrics import add_process_metrics

GROUPS = {"host": "", "tasks": "/workload.slice", "agent": "/hostcritical.slice"}
"""Groups with sums, and their cgroups. The pressure of the root cgroup is the host's (psi.rst)."""
_NO_USAGE = Usages(at_boot_s=0.0, tasks=[])
_TASK_COUNTERS: Mapping[str, tuple[str, Callable[[TaskUsage], float]]] = {
    "twine_task_cpu_seconds": ("CPU time since the start of its unit.", lambda u: u.cpu_s),
    "twine_task_throttled_seconds": (
        "Time for which its CPU limit throttled it.",
        lambda u: u.throttled_s,
    ),
    "twine_task_oom_kills": (
        "Processes the kernel killed for memory since the start of its unit.",
        lambda u: u.oom_kills,
    ),
    "twine_task_read_bytes": ("Bytes read from devices.", lambda u: u.read_bytes),
    "twine_task_written_bytes": ("Bytes written to devices.", lambda u: u.written_bytes),
}
_TASK_GAUGES: Mapping[str, tuple[str, Callable[[TaskUsage], float]]] = {
    "twine_task_memory_bytes": ("Memory in use, page cache included.", lambda u: u.memory_bytes),
    "twine_task_memory_peak_bytes": (
        "Peak memory since the start of its unit.",
        lambda u: u.memory_peak_bytes,
    ),
    "twine_task_processes": ("Processes and threads.", lambda u: u.processes),
}


@dataclass(frozen=True, slots=True)
class ScrapedValues:
    """The values of one scrape."""

    tasks: Sequence[TaskStatus]
    specs: Mapping[str, TaskSpec]
    usages: Usages
    groups: Mapping[str, Usage]
    images: int | None
    """None: they were never counted."""
    probes: Mapping[tuple[str, bool], int]


class AgentMetrics:
    """Answers scrapes; the usage of tasks is read from their cgroups."""

    def __init__(
        self,
        tasks: TaskQueries,
        images: HostImages,
        prober: Prober,
        cgroups: Cgroups,
        lanes: Lanes,
        usage: Callable[[], Awaitable[Usages]],
        disk: StateDisk,
    ) -> None:
        self._tasks, self._prober = tasks, prober
        self._cgroups, self._lanes, self._usage = cgroups, lanes, usage
        self._disk = disk
        self._counting = PatientCall(lanes, IMAGE_FILES, lambda: len(images.all()))
        self._images: int | None = None
        """Number of images when they were last counted."""
        self._process = add_process_metrics(CollectorRegistry())

    async def scrape(self, *, ready: bool) -> bytes:
        """Return the text of a scrape; until the agent is `ready` it has no tasks."""
        usages = await self._usage() if ready else _NO_USAGE
        groups = await self._lanes.run("usage", self._groups)
        statuses = self._tasks.all() if ready else []
        specs = ((s.task_id, self._tasks.find_spec(s.task_id)) for s in statuses)
        scraped = ScrapedValues(
            tasks=statuses,
            specs={task_id: spec for task_id, spec in specs if spec is not None},
            usages=usages,
            groups=groups,
            images=await self._count_images(),
            probes=dict(self._prober.answers),
        )
        registry = CollectorRegistry()
        registry.register(StaticCollector(list(families(scraped))))
        of_tasks = await self._lanes.run("usage", generate_latest, registry)
        return of_tasks + generate_latest(self._process)

    async def _count_images(self) -> int | None:
        """Return the number of images; while the disk hangs, the last one that is known."""
        with suppress(TimeoutError):
            self._images = await self._counting.within(0.0 if self._disk.is_hung else ANSWER_S)
        return self._images

    def _groups(self) -> dict[str, Usage]:
        read = ((name, self._cgroups.read(group)) for name, group in GROUPS.items())
        return {name: usage for name, usage in read if usage is not None}


class StaticCollector(Collector):
    """Returns metrics that were read before."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> list[Metric]:
        return self._found


def families(scraped: ScrapedValues) -> Iterator[Metric]:
    """Yield every metric of a scrape but those of the process."""
    states = GaugeMetricFamily("twine_tasks", "Tasks by state", labels=["state"])
    for state in TaskState:
        states.add_metric([state.value], sum(t.state is state for t in scraped.tasks))
    yield states
    images = GaugeMetricFamily("twine_images", "Complete images.")
    if scraped.images is not None:
        images.add_metric([], scraped.images)
    yield images
    answers = CounterMetricFamily(
        "twine_probe_answers", "Answers to probes, by kind and outcome.", labels=["kind", "outcome"]
    )
    for (kind, good), count in sorted(scraped.probes.items()):
        answers.add_metric([kind, "good" if good else "bad"], count)
    yield answers
    yield from _of_groups(scraped.groups)
    yield from _of_tasks(scraped)
    yield from _of_usages(scraped)


def _of_groups(groups: Mapping[str, Usage]) -> Iterator[Metric]:
    cpu = CounterMetricFamily(
        "twine_host_cpu_seconds", "CPU time: of the host, all tasks, the agent.", labels=["of"]
    )
    memory = GaugeMetricFamily(
        "twine_host_memory_bytes", "Memory in use: by all tasks, by the agent.", labels=["of"]
    )
    pressure = GaugeMetricFamily(
        "twine_host_pressure_ratio",
        "Share of the last 10 s in which some process stalled (PSI some).",
        labels=["of", "resource"],
    )
    for name, used in groups.items():
        cpu.add_metric([name], used.cpu_s)
        if used.memory_bytes:  # the root cgroup does not have this file
            memory.add_metric([name], used.memory_bytes)
        for resource, share in _pressures(used):
            pressure.add_metric([name, resource], share)
    yield from (cpu, memory, pressure)


def _of_tasks(scraped: ScrapedValues) -> Iterator[Metric]:
    restarts = CounterMetricFamily(
        "twine_task_restarts", "Starts after its main process ended.", labels=["task", "job"]
    )
    healthy = GaugeMetricFamily(
        "twine_task_healthy", "1: healthy, 0: unhealthy or unknown.", labels=["task", "job"]
    )
    limit = GaugeMetricFamily(
        "twine_task_memory_max_bytes", "Memory limit.", labels=["task", "job"]
    )
    last = GaugeMetricFamily(
        "twine_task_last_exit_timestamp_seconds",
        "When and how its main process ended last.",
        labels=["task", "job", "result"],
    )
    for task in scraped.tasks:
        names = [task.task_id, task.job]
        restarts.add_metric(names, task.restarts)
        healthy.add_metric(names, task.health is Health.HEALTHY)
        if (spec := scraped.specs.get(task.task_id)) is not None:
            limit.add_metric(names, spec.limits.memory_max_bytes)
        if task.last_exit is not None:
            last.add_metric([*names, task.last_exit.result], task.last_exit.at)
    yield from (restarts, healthy, limit, last)


def _of_usages(scraped: ScrapedValues) -> Iterator[Metric]:
    jobs = {task.task_id: task.job for task in scraped.tasks}
    named = [([u.task_id, jobs.get(u.task_id, "")], u) for u in scraped.usages.tasks]
    for name, (text, value) in _TASK_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=["task", "job"])
        for names, used in named:
            counter.add_metric(names, value(used))
        yield counter
    for name, (text, value) in _TASK_GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=["task", "job"])
        for names, used in named:
            gauge.add_metric(names, value(used))
        yield gauge
    pressure = GaugeMetricFamily(
        "twine_task_pressure_ratio",
        "Share of the last 10 s in which some process of it stalled (PSI some).",
        labels=["task", "job", "resource"],
    )
    for names, used in named:
        for resource, share in _pressures(used):
            pressure.add_metric([*names, resource], share)
    yield pressure


def _pressures(used: TaskUsage | Usage) -> Iterator[tuple[str, float]]:
    yield "cpu", used.cpu_pressure
    yield "memory", used.memory_pressure
    yield "io", used.io_pressure
