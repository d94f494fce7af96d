"""Chooses the CPUs of a task's own: whole cores, of one NUMA node if possible.

Pure. `resources/exclusive_cpus.py` reads the cores, remembers the choice for each task, and keeps
other tasks off these CPUs (docs/adr/0099).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass

from agent.api import Resources, TaskSpec
from wire.cpus import Core, cpu_list_text


@dataclass(frozen=True, slots=True)
class CpusInUse:
    """CPUs of a machine that other tasks have or need."""

    own: frozenset[int] = frozenset()
    """CPUs of tasks that have CPUs of their own."""
    pinned: frozenset[int] = frozenset()
    """CPUs that tasks name in `resources.cpus`."""
    sharing: int = 0
    """Number of tasks without CPUs of their own, which run on the remaining CPUs."""


def choose_cpus(
    cores: Iterable[Core], taken: Collection[int], count: int, had: Collection[int] = ()
) -> tuple[int, ...]:
    """Return `count` CPUs of whole, free cores, sorted; empty if there are not enough.

    The task keeps cores that it `had`, as far as it needs them. Otherwise the NUMA node with the
    fewest free cores that suffice is used; several nodes only if no single one suffices. CPU 0 is
    used last, because the kernel does most of its own work there. The choice is exact if all cores
    have the same number of CPUs.
    """
    free = [core for core in cores if core.cpus and core.whole and not set(core.cpus) & set(taken)]
    kept = [core for core in free if set(core.cpus) <= set(had)]
    nodes = _by_node(free)
    room = {node: sum(len(core.cpus) for core in found) for node, found in nodes.items()}
    by_room = sorted(nodes, key=lambda node: (room[node], node))
    home = sorted({core.node for core in kept})
    near = [core for node in home for core in nodes[node]]
    far = [core for node in reversed(by_room) if node not in home for core in nodes[node]]
    ways: list[list[list[Core]]] = [[kept], [kept, near]] if kept else []
    if not kept:
        ways += [[nodes[node]] for node in by_room]
    ordered = [core for of_node in _by_node(far).values() for core in _ordered(of_node)]
    ways.append([kept, near, *([core] for core in ordered)])
    for way in ways:
        if found := _filled(way, count):
            return found
    return ()


def _by_node(cores: Iterable[Core]) -> dict[int, list[Core]]:
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.node, []).append(core)
    return nodes


def _ordered(cores: Iterable[Core]) -> list[Core]:
    return sorted(cores, key=lambda core: (-len(core.cpus), -core.cpus[0]))


def _filled(groups: Iterable[list[Core]], count: int) -> tuple[int, ...]:
    """Return exactly `count` CPUs from groups of cores, earlier groups first; else none."""
    cpus: set[int] = set()
    for group in groups:
        for core in _ordered(group):
            if len(cpus.union(core.cpus)) <= count:
                cpus.update(core.cpus)
    return tuple(sorted(cpus)) if len(cpus) == count else ()


def usable_cpus(cores: Iterable[Core]) -> frozenset[int]:
    """Return all CPUs that tasks may use."""
    return frozenset(cpu for core in cores for cpu in core.cpus)


def shared_cpus(cores: Iterable[Core], own: Collection[int]) -> tuple[int, ...]:
    """Return the CPUs for tasks without CPUs of their own; `own` are those of the other tasks."""
    return tuple(sorted(usable_cpus(cores).difference(own)))


def online_cpus(cores: Iterable[Core]) -> frozenset[int]:
    """Return all CPUs, also those that tasks may not use."""
    return frozenset(cpu for core in cores for cpu in (*core.cpus, *core.others))


def is_still_valid(cores: Sequence[Core], own: Collection[int], count: int) -> bool:
    """Return whether CPUs chosen earlier still are `count` CPUs of whole cores for tasks."""
    whole = frozenset(cpu for core in cores if core.whole for cpu in core.cpus)
    cut = any(0 < len(set(c.cpus) & set(own)) < len(c.cpus) for c in cores)
    return len(set(own)) == count and whole.issuperset(own) and not cut


def refusal(cores: Sequence[Core], taken: CpusInUse, count: int, had: Collection[int] = ()) -> str:
    """Return why a task cannot have `count` CPUs of its own, with numbers; empty if it can."""
    everything, attempt = usable_cpus(cores), f"resources.exclusive_cpus {count}"
    sizes = {len(core.cpus) for core in cores if core.cpus and core.whole}
    if len(sizes) == 1 and count % (size := min(sizes)):
        less = count - count % size
        ask = f"request {less + size}" + (f" or {less}" if less else "")
        return f"{attempt} is not a number of whole cores: each has {size} CPUs here; {ask}"
    if choose_cpus(cores, taken.own | taken.pinned, count, had):
        if taken.sharing and len(everything - taken.own) <= count:
            others = f"{taken.sharing} other tasks" if taken.sharing > 1 else "another task"
            return f"{attempt} would leave no CPU of {len(everything)} for {others}"
        return ""
    parts = [f"tasks may use {_cpus(everything)}"]
    parts += [f"{_cpus(taken.own)} exclusive CPUs of other tasks"] if taken.own else []
    parts += [f"{_cpus(taken.pinned)} requested by number"] if taken.pinned else []
    halves = frozenset(cpu for core in cores if not core.whole for cpu in core.cpus)
    parts += [f"{_cpus(halves)} of cores that also have other work"] if halves else []
    return f"{attempt} does not fit: {', '.join(parts)}"


def _cpus(cpus: Set[int]) -> str:
    return (
        f"{len(cpus)} CPUs ({cpu_list_text(cpus)})"
        if len(cpus) != 1
        else f"CPU {cpu_list_text(cpus)}"
    )


def sharing_refusal(cores: Iterable[Core], own: frozenset[int], pinned: Collection[int]) -> str:
    """Return why a task without CPUs of its own cannot run; `pinned` are the CPUs that it names."""
    if shared_out := sorted(own.intersection(pinned)):
        return f"resources.cpus: CPU {shared_out[0]} is exclusive to another task"
    if own and not shared_cpus(cores, own):
        return f"all {len(own)} CPUs for tasks ({cpu_list_text(own)}) are exclusive to other tasks"
    return ""


def exclusive_cpu_properties(own: Sequence[int]) -> dict[str, object]:
    """Return the properties that keep a unit on its own CPUs; empty for a task without any."""
    return {"AllowedCPUs": tuple(own)} if own else {}


def allowed_cpus(
    own: Sequence[int], before: Resources | None, spec: TaskSpec, everything: Sequence[int]
) -> dict[str, object]:
    """Return the properties that give a running unit its CPUs; `before` are its current resources.

    A list of all CPUs removes a limit that is no longer requested. systemd accepts an empty list
    but does not change the kernel's file.
    """
    if own:
        return exclusive_cpu_properties(own)
    lifted = before is not None and before.cpus and not spec.resources.cpus
    return {"AllowedCPUs": tuple(everything)} if lifted and everything else {}


def exclusive_cpu_values(own: Sequence[int]) -> dict[str, str]:
    """Return the cgroup file that confirms these CPUs, with its value (cgroup-v2.rst)."""
    return {"cpuset.cpus.effective": cpu_list_text(own)} if own else {}
