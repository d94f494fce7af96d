"""The ReBalancer compared with other methods on public traces, which are given as files.

    python -m tests.bench.rebalance_traces [--json] [FOLDER]

Without a folder nothing is measured. FOLDER has files of the public repository alibaba/clusterdata:
`openb_node_list_all_node.csv` and `openb_pod_list_default.csv` of cluster-trace-gpu-v2023/csv (Weng
et al., ATC 2023), and `disaggregated_DLRM_trace.csv` of cluster-trace-gpu-v2025 (Yang et al., NSDI
2025).

Traces have the requests of tasks, not their use, so requests are the loads. Tasks are placed where
they fit most tightly, in the order of their creation, as packing schedulers do. The bench uses the
moment with the most requested CPU; no task of openb ends, as in its authors' evaluation. The GPUs
of a machine are one amount. The DLRM trace has no machines: tasks of each role get as many of the
sizes in `_MACHINES` that two thirds of the most requested resource (not GPUs) are requested. HiGHS
alone is left out: the smallest instance has 4.8 million pairs of task and machine.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from control_plane.rebalancer.__main__ import own_output
from control_plane.rebalancer.core.model import BinRule, RegionModel, TaskKind, Weights
from tests.bench.rebalance import descheduled, figures_of, ours, repacked
from tests.rebalancer_models import columns

Figures = dict[str, Any]
_MICRO, _MIB, _GIB = 1_000_000, 1 << 20, 1 << 30
_MSBS = 12
_MACHINES = {"CN": (192.0, 1024 * _GIB, 0.0), "HN": (128.0, 1024 * _GIB, 8.0)}
"""Cores, bytes, GPUs: assumed, as the trace does not have them; its largest task requests 64 cores.
"""
_TAKEN = 2 / 3
_LINK = 100
"""RDMA of a machine: tasks request percent of it."""


@dataclass(frozen=True)
class TraceMachine:
    """One machine of a trace."""

    cores: float
    memory_bytes: int
    gpus: float
    model: str = ""


@dataclass(frozen=True)
class TraceTask:
    """One task of a trace, with the times of its start and end."""

    job: str
    cores: float
    memory_bytes: int
    gpus: float
    mbps: int
    begins: float
    ends: float
    models: tuple[str, ...] = ()
    """Permitted GPU types; empty: any."""
    most: int = 0
    """Maximum number of tasks of its job on one machine; 0: any number."""


def openb(folder: Path) -> tuple[list[TraceMachine], list[TraceTask]]:
    """Return machines and tasks of the openb trace; every task is a job of its own."""
    machines = [
        TraceMachine(
            int(row["cpu_milli"]) / 1000,
            int(row["memory_mib"]) * _MIB,
            float(row["gpu"]),
            row["model"],
        )
        for row in _rows(folder / "openb_node_list_all_node.csv")
    ]
    tasks = [
        TraceTask(
            job=row["name"],
            cores=int(row["cpu_milli"]) / 1000,
            memory_bytes=int(row["memory_mib"]) * _MIB,
            gpus=int(row["num_gpu"] or 0) * int(row["gpu_milli"] or 0) / 1000,
            mbps=0,
            begins=_number(row["creation_time"], -inf),
            ends=inf,
            models=tuple(filter(None, row["gpu_spec"].split("|"))),
        )
        for row in _rows(folder / "openb_pod_list_default.csv")
    ]
    return machines, tasks


def dlrm(folder: Path, role: str) -> tuple[list[TraceMachine], list[TraceTask]]:
    """Return tasks of one role of the DLRM trace, and machines for them."""
    tasks = [
        TraceTask(
            job=row["app_name"],
            cores=float(row["cpu_request"]),
            memory_bytes=int(float(row["memory_request"]) * _GIB),
            gpus=float(row["gpu_request"]),
            mbps=int(float(row["rdma_request"])),
            begins=_number(row["creation_time"], -inf),
            ends=_number(row["deletion_time"], inf),
            most=max(0, int(row["max_instance_per_node"])),
        )
        for row in _rows(folder / "disaggregated_DLRM_trace.csv")
        if row["role"] == role
    ]
    cores, memory, gpus = _MACHINES[role]
    there = _alive(tasks, _busiest(tasks))
    taken = max(
        sum(task.cores for task in there) / cores,
        sum(task.memory_bytes for task in there) / memory,
        sum(task.mbps for task in there) / _LINK,
    )
    number = ceil(taken / _TAKEN)
    return [TraceMachine(cores, memory, gpus)] * number, tasks


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        sys.exit(f"{path} is not there: it is of the public repository alibaba/clusterdata")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _number(text: str, other: float) -> float:
    return float(text) if text and text != "NaN" else other


def _alive(tasks: Iterable[TraceTask], at: float) -> list[TraceTask]:
    return [task for task in tasks if task.begins <= at < task.ends]


def _busiest(tasks: list[TraceTask]) -> float:
    """Return the moment at which most CPU is requested."""
    changes = sorted(
        [(t.begins, t.cores) for t in tasks] + [(t.ends, -t.cores) for t in tasks if t.ends < inf]
    )
    now, most, found = 0.0, 0.0, -inf
    for at, cores in changes:
        now += cores
        if now > most:
            most, found = now, at
    return found


class _Region:
    """Machines with room, as tasks start and end."""

    def __init__(self, machines: list[TraceMachine]) -> None:
        self.cores = np.array([m.cores for m in machines])
        self.models = np.array([m.model for m in machines])
        self.cpu = np.array([int(m.cores * _MICRO) for m in machines])
        self.room = np.array(
            [[m.memory_bytes, int(m.gpus * _MICRO), _LINK, 0, 10_000] for m in machines]
        )
        self.on: defaultdict[TraceTask, list[int]] = defaultdict(list)
        self.jobs: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def place(self, task: TraceTask) -> None:
        """Place a task where it fits most tightly; one that fits nowhere is left out."""
        ok = (self.cpu >= int(task.cores * _MICRO)) & (self.room >= needs_of(task)).all(axis=1)
        if task.models:
            ok &= np.isin(self.models, task.models)
        if task.most:
            ok[[m for m, n in self.jobs[task.job].items() if n >= task.most]] = False
        if ok.any():
            best = int(np.where(ok, self.cpu / self.cores, np.inf).argmin())
            self.on[task].append(best)
            self._charge(task, best, 1)

    def end(self, task: TraceTask) -> None:
        """Remove a task."""
        if self.on[task]:
            self._charge(task, self.on[task].pop(), -1)

    def _charge(self, task: TraceTask, m: int, sign: int) -> None:
        self.cpu[m] -= sign * int(task.cores * _MICRO)
        self.room[m] -= sign * np.array(needs_of(task))
        self.jobs[task.job][m] += sign


def needs_of(task: TraceTask) -> tuple[int, int, int, int, int]:
    """Return the claims of a task in addition to CPU."""
    return task.memory_bytes, int(task.gpus * _MICRO), task.mbps, 0, 0


def region(machines: list[TraceMachine], tasks: list[TraceTask]) -> RegionModel:
    """Return the region at its busiest moment."""
    at, made = _busiest(tasks), _Region(machines)
    events = [(t.begins, 1, n, t) for n, t in enumerate(tasks) if t.begins <= at]
    events += [(t.ends, 0, n, t) for n, t in enumerate(tasks) if t.ends <= at]
    for _, begins, _, task in sorted(events, key=lambda event: event[:3]):
        (made.place if begins else made.end)(task)
    there = [(task, m) for task, on in made.on.items() for m in on]
    jobs = {name: j for j, name in enumerate(dict.fromkeys(task.job for task, _ in there))}
    most = {task.job: task.most for task, _ in there}
    models = {each: a for a, each in enumerate(dict.fromkeys(task.models for task, _ in there))}
    kinds = dict.fromkeys(
        TaskKind(0, int(task.cores * _MICRO), needs_of(task), models[task.models])
        for task, _ in there
    )
    number = {kind: k for k, kind in enumerate(kinds)}
    rows, index = [], defaultdict[str, int](int)
    for task, m in there:
        kind = TaskKind(0, int(task.cores * _MICRO), needs_of(task), models[task.models])
        rows.append((jobs[task.job], index[task.job], number[kind], m))
        index[task.job] += 1
    loads = [(t.cores, float(t.memory_bytes), float(t.mbps)) for t, _ in there]
    return RegionModel(
        weights=Weights(),
        pools=["trace"],
        machines=[f"m{m:05}" for m in range(len(machines))],
        pool_of=[0] * len(machines),
        is_free=[False] * len(machines),
        is_open=[True] * len(machines),
        sizes=[(m.cores, float(m.memory_bytes), float(_LINK)) for m in machines],
        cpu_grains=[(1, 1)] * len(machines),
        room_cpu=made.cpu.tolist(),
        room=[(r[0], r[1], r[2], r[3], r[4]) for r in made.room.tolist()],
        bins=[[m % _MSBS for m in range(len(machines))]],
        admissions=[bytes(not each or m.model in each for m in machines) for each in models],
        jobs=list(jobs),
        rules=[[BinRule(-1, True, most[name])] if most[name] else [] for name in jobs],
        kinds=list(kinds),
        tasks=columns(
            rows, loads, [0.002 * t.memory_bytes / _GIB for t, _ in there], [True] * len(rows)
        ),
    )


def compared(model: RegionModel) -> Figures:
    """Return the figures of the ReBalancer and of other methods on one region."""
    answer, took_s = ours(model, 60.0)
    bound = answer.bound or 0.0
    return {
        "machines": len(model.machines),
        "tasks": len(model.tasks.can_move),
        "rebalancer": figures_of(answer, took_s),
        "descheduler": descheduled(model, bound),
        "best_fit_again": repacked(model, bound),
    }


def report(folder: Path, output: TextIO, *, as_json: bool) -> None:
    """Write the figures of each trace."""
    traces = {"openb": openb(folder), "dlrm_cn": dlrm(folder, "CN"), "dlrm_hn": dlrm(folder, "HN")}
    found: Figures = {}
    for name, trace in traces.items():
        found[name] = compared(region(*trace))
        for what, value in found[name].items() if not as_json else ():
            print(f"{name:8} {what:15} {value}", file=output, flush=True)
    if as_json:
        print(json.dumps(found), file=output)


def main() -> None:
    """Read the traces and print figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    if options.folder is None:
        print("no folder given: nothing is measured", file=sys.stderr)
        print(json.dumps({"measured": "nothing: no folder with traces was given"}))
        return
    with io.TextIOWrapper(own_output()) as output:
        report(options.folder, output, as_json=options.json)


if __name__ == "__main__":
    main()
