"""Is a shard ever without two replicas? The paper's Figure 14, with TaskControl and without.

    python -m tests.bench.figure_14 [--tasks 1000] [--shards 15000] [--out FOLDER] [--json]

A cache of 1,000 tasks, one on each machine of 20 MSBs, holds 15,000 shards of three replicas. At T0
all tasks get a new version; each is away for four minutes. At T120 an MSB of 50 machines loses its
power, at T415 it is back. The control plane is the real one, on virtual time; its agents are in
memory. There are two runs. One uses the built-in controller `[shards]`. The other uses fixed update
domains, as other systems do: a quarter of the MSBs each, one after another, regardless of failures.

Replicas lie in copysets: each of two permutations of the tasks is cut into groups of three tasks of
different domains, and a shard is on one group. With a random placement most pairs of tasks would
share a shard, and hardly any tasks could be updated at once.

It prints `first_batch` (paper: 274) and `one_down`, the shards that lose a replica by it (12,264).
`failed_two_down` counts shards that lose a second replica by the power cut (1,292); then follows
`second_batch` (214). `else_two_down` counts shards without two replicas for any other reason: there
are none. The curves are written to the folder as CSV and SVG.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.api import Limits, Location
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.jobs import ControllerRef, JobSpec, TaskPhase, UpdatePolicy
from control_plane.api.settings import SchedulerSettings
from control_plane.broker.keys import prefix_of
from control_plane.roles import ControlPlane
from control_plane.runtime.runtime import SteppedRuntime
from control_plane.store import Put
from control_plane.store.memory import MemoryStore
from control_plane.store.records import encode
from taskcontrol.api import TaskControlRequest, TaskControlResponse
from taskcontrol.shards import Sharded
from tests.bench.hosts_in_memory import IMAGE, Hosts, find_image
from tests.virtual_time import VirtualLoop, clock

MSBS, REPLICAS, PERMUTATIONS, DOMAINS = 20, 3, 2, 4
AWAY_S, FAILS_S, BACK_S, SAMPLE_S = 225.0, 120.0, 415.0, 5.0
END_S = 3 * 3600.0


def domain_of(number: int) -> int:
    """Return the update domain of a machine: five MSBs are one."""
    return number % MSBS * DOMAINS // MSBS


def placed(tasks: int, shards: int, seed: int) -> list[frozenset[int]]:
    """Return the tasks of each shard's replicas."""
    chance, copysets = random.Random(seed), list[frozenset[int]]()
    for _ in range(PERMUTATIONS):
        left = list(range(tasks))
        chance.shuffle(left)
        while len(left) >= REPLICAS:
            group = [left.pop()]
            for task in list(left):
                if all(domain_of(task) != domain_of(other) for other in group):
                    group.append(task)
                    left.remove(task)
                if len(group) == REPLICAS:
                    copysets.append(frozenset(group))
                    break
            else:
                break  # the remaining tasks are all of one domain
    return [copysets[shard % len(copysets)] for shard in range(shards)]


@dataclass
class Sample:
    """One point of the curves."""

    at: float
    updating: int
    one_down: int
    two_down: int
    else_two_down: int
    """Without shards that miss a replica in the failed MSB and one that was being updated then."""
    three_down: int


@dataclass
class Replay:
    """One run."""

    tasks: int
    shards: int
    controlled: bool
    seed: int = 1
    samples: list[Sample] = field(default_factory=list)
    batches: Counter[int] = field(default_factory=Counter)
    """Turn → tasks that were acknowledged; a turn is as long as a task is unavailable."""
    counted: set[int] = field(default_factory=set)

    def run(self) -> None:
        self.where = placed(self.tasks, self.shards, self.seed)
        self.of: dict[int, list[str]] = {task: [] for task in range(self.tasks)}
        for number, group in enumerate(self.where):
            for task in group:
                self.of[task].append(str(number))
        self.msb: dict[int, int] = {}
        self.away_then: set[int] = set()
        self.failed: set[int] = set()
        self.began = 0.0
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(self._play())

    # -- the two controllers

    async def _answer(self, _: ControllerRef, request: TaskControlRequest) -> TaskControlResponse:
        ack = self._shards(request) if self.controlled else self._domains(request)
        waiting = {operation.id: operation for operation in request.request}
        began = self.began or request.at
        for task in (waiting[i].task for i in ack if waiting[i].kind == "update"):
            if task not in request.down and task not in self.counted:
                self.counted.add(task)
                self.began = began
                self.batches[int((request.at - began) / AWAY_S)] += 1
        return TaskControlResponse(ack=list(ack))

    def _shards(self, request: TaskControlRequest) -> list[str]:
        answer = Sharded().answer(request, self.of)
        return [ack if isinstance(ack, str) else ack.operation for ack in answer.ack]

    def _domains(self, request: TaskControlRequest) -> list[str]:
        """Acknowledge the first domain that is not done; failures are ignored."""
        free = [o.id for o in request.request if o.task in request.down]
        pending = {o.task: o.id for o in request.request if o.kind == "update"}
        if not pending:
            return free
        domain = min(map(self._domain, pending))
        before = {self._domain(task) for task in request.down - self.failed}
        if before - {domain}:
            return free  # the domain before is not back
        return free + [i for task, i in pending.items() if self._domain(task) == domain]

    def _domain(self, task: int) -> int:
        return domain_of(self.msb[task])

    # -- the run

    async def _play(self) -> None:
        self.hosts = Hosts(self.seed)
        store = MemoryStore()
        async with store:
            await self._fill(store)
            settings = SchedulerSettings(
                destructive_per_s=1e6,
                destructive_burst=1_000_000,
                profile_switches_burst=1_000_000,
                capacity_loss_share=1.0,
                join_grace_s=0,
                repair_after_s=1e6,
            )
            runtime = SteppedRuntime(clock, seed=self.seed)
            self.cp = ControlPlane(
                store, self.hosts.agent, runtime, settings, find_image, call_controller=self._answer
            )
            async with self.cp:
                await self._deploy()
                self.hosts.start_s = (AWAY_S, AWAY_S + 10)
                await self.cp.apply_job(self._job("2"))
                await self._watch()

    async def _fill(self, store: MemoryStore) -> None:
        for task in range(self.tasks):
            msb = task % MSBS
            place = Location(datacenter=f"dc{msb % 4}", msb=f"msb{msb}", rack=f"r{task // 40}")
            record = self.hosts.add(f"m{task:04}", place)
            key = prefix_of(place.datacenter) + record.machine
            await store.txn({}, [Put(key, encode(record))])

    def _job(self, release: str) -> JobSpec:
        return JobSpec(
            name="cache",
            entitlement="cache",
            tasks=self.tasks,
            image=IMAGE,
            command=["/bin/cache"],
            environment={"RELEASE": release},
            limits=Limits(memory_max_bytes=20 << 30),
            update=UpdatePolicy(max_unavailable=self.tasks, drain_s=1),
            controller=ControllerRef(url="https://10.0.0.9:1", name="cache", failure_wait_s=7200),
        )

    async def _deploy(self) -> None:
        await self.cp.capacity.put_entitlement(
            "cache", EntitlementSpec(machines=self.tasks, host_profile="cache")
        )
        await self.cp.apply_job(self._job("1"))
        while len(self._serving()) < self.tasks:
            await asyncio.sleep(1.0)
        # the allocator chooses the machine of each task: shards follow its MSBs
        self._follow_places()

    def _follow_places(self) -> None:
        """Renumber the tasks by their machines, so that replicas are in different MSBs."""
        at = {t.index: int(t.placement.machine[1:]) for t in self._tasks() if t.placement}
        back = {machine: task for task, machine in at.items()}
        self.msb = {task: machine % MSBS for task, machine in at.items()}
        self.where = [frozenset(back[number] for number in group) for group in self.where]
        self.of = {task: [] for task in range(self.tasks)}
        for number, group in enumerate(self.where):
            for task in group:
                self.of[task].append(str(number))

    def _tasks(self) -> Sequence[Any]:
        return self.cp._jobs.get("cache").tasks

    def _serving(self) -> set[int]:
        return {
            t.index
            for t in self._tasks()
            if t.phase is TaskPhase.RUNNING
            and t.listed
            and self.hosts.by_name[t.placement.machine].off_at is None
        }

    async def _watch(self) -> None:
        began = asyncio.get_running_loop().time()
        at = 0.0
        while at < END_S:
            now = asyncio.get_running_loop().time() - began
            if now >= FAILS_S and not self.failed:
                self.away_then = set(range(self.tasks)) - self._serving()
                self.failed = {task for task, msb in self.msb.items() if msb == 0}
                for host in self._failing():
                    host.power_off()
            if now >= BACK_S:
                for host in self._failing():
                    if host.off_at is not None:
                        host.power_on()
            self.samples.append(self._sample(now))
            record = self.cp._jobs.get("cache")
            done = all(t.version == record.version for t in record.tasks)
            if done and len(self._serving()) == self.tasks and now > BACK_S:
                return
            await asyncio.sleep(SAMPLE_S)
            at = now
        raise RuntimeError(f"the update did not end within {END_S:.0f} s")

    def _failing(self) -> Iterator[Any]:
        return (h for h in self.hosts.by_name.values() if int(h.name[1:]) % MSBS == 0)

    def _sample(self, now: float) -> Sample:
        down = set(range(self.tasks)) - self._serving()
        missing = Counter(len(group & down) for group in self.where)
        excused = sum(
            1
            for group in self.where
            if len(group & down) >= 2
            and group & self.failed
            and group & (self.away_then - self.failed) & down
        )
        two = missing[2] + missing[3]
        updating = len(down - self.failed)
        return Sample(now, updating, missing[1], two, two - excused, missing[3])

    def figures(self) -> dict[str, float]:
        """Return the figures that the paper also has."""
        before = [s for s in self.samples if s.at < FAILS_S]
        return {
            "first_batch": self.batches[0],
            "one_down": max(s.one_down for s in before),
            "before_two_down": max(s.two_down for s in before),
            "failed_two_down": max(s.two_down - s.else_two_down for s in self.samples),
            "second_batch": self.batches[1],
            "else_two_down": max(s.else_two_down for s in self.samples),
            "minutes": round(self.samples[-1].at / 60, 1),
        }


def csv_of(samples: Sequence[Sample]) -> str:
    """Return the curves as a table."""
    rows = [f"{s.at:.0f},{s.updating},{s.one_down},{s.two_down},{s.else_two_down}" for s in samples]
    return "\n".join(["seconds,updating,one_down,two_down,else_two_down", *rows]) + "\n"


def svg_of(title: str, samples: Sequence[Sample]) -> str:
    """Return the curves as a picture: shards with one replica down, and with two."""
    width, height, edge = 760, 320, 50
    end = samples[-1].at
    most = max(max(s.one_down for s in samples), 1)

    def line(name: str, colour: str) -> str:
        points = " ".join(
            f"{edge + s.at / end * (width - 2 * edge):.1f},"
            f"{height - edge - getattr(s, name) / most * (height - 2 * edge):.1f}"
            for s in samples
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'

    base = height - edge
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">'
        f'<text x="{edge}" y="20" font-size="14">{title}</text>'
        f'<text x="{edge}" y="38" fill="#36c">one replica down (at most {most:,})</text>'
        f'<text x="{edge + 260}" y="38" fill="#c22">two replicas down</text>'
        f'<path d="M{edge} {edge}V{base}H{width - edge}" fill="none" stroke="#888"/>'
        f'<text x="{edge}" y="{base + 18}">0</text>'
        f'<text x="{width - edge}" y="{base + 18}" text-anchor="end">{end:.0f} s</text>'
        f"{line('one_down', '#36c')}{line('two_down', '#c22')}</svg>\n"
    )


def replayed(tasks: int, shards: int, *, controlled: bool, seed: int = 1) -> Replay:
    """Run the replay and return it."""
    replay = Replay(tasks, shards, controlled, seed)
    replay.run()
    return replay


def main() -> None:
    """Print the figures, and write the curves if a folder is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the curves")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    figures: dict[str, Any] = {}
    for name, controlled in (("taskcontrol", True), ("domains", False)):
        began = time.process_time()
        replay = replayed(options.tasks, options.shards, controlled=controlled, seed=options.seed)
        figures[name] = replay.figures() | {"cpu_s": round(time.process_time() - began, 1)}
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"figure-14-{name}.csv").write_text(csv_of(replay.samples))
            title = "With TaskControl" if controlled else "With fixed update domains"
            (options.out / f"figure-14-{name}.svg").write_text(svg_of(title, replay.samples))
    if options.json:
        print(json.dumps(figures))
    else:
        for name, found in figures.items():
            for key, value in found.items():
                print(f"{name + ' ' + key:32} {value:g}")


if __name__ == "__main__":
    main()
