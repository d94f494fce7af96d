"""Which CPUs become a task's own: whole cores, of one NUMA node where that is possible.

Pure. `resources/exclusive_cpus.py` reads the cores, remembers which task has which, and keeps
other tasks off them (docs/adr/0099).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass

from agent.api import Resources, TaskSpec
from wire.cpus import Core, listed


@dataclass(frozen=True, slots=True)
class Taken:
    """What of a machine's CPUs is spoken for by other tasks."""

    own: frozenset[int] = frozenset()
    """CPUs of tasks that have CPUs of their own."""
    pinned: frozenset[int] = frozenset()
    """Named by tasks in `resources.cpus`."""
    sharing: int = 0
    """How many tasks have no CPUs of their own, and so run on what is left."""


def chosen(
    cores: Iterable[Core], taken: Collection[int], count: int, had: Collection[int] = ()
) -> tuple[int, ...]:
    """Return `count` CPUs that are whole cores and not taken, sorted; none where there are not.

    Cores that the task `had` stay with it as far as it needs them. Otherwise the node is taken
    that has enough and least beyond it; several only where none alone has enough. CPU 0 goes last:
    the kernel does most of its own work there. Exact where all cores have the same number of CPUs.
    """
    free = [core for core in cores if core.cpus and core.whole and not set(core.cpus) & set(taken)]
    kept = [core for core in free if set(core.cpus) <= set(had)]
    nodes: dict[int, list[Core]] = {}
    for core in free:
        nodes.setdefault(core.node, []).append(core)
    by_room = sorted(nodes, key=lambda node: (_size(nodes[node]), node))
    home = sorted({core.node for core in kept})
    near = [core for node in home for core in nodes[node]]
    far = [core for node in reversed(by_room) if node not in home for core in nodes[node]]
    ways: list[list[list[Core]]] = [[kept], [kept, near]] if kept else []
    if not kept:
        ways += [[nodes[node]] for node in by_room]
    ways.append([kept, near, *([core] for core in _ordered_by_node(far))])
    for way in ways:
        if found := _filled(way, count):
            return found
    return ()


def _size(cores: Iterable[Core]) -> int:
    return sum(len(core.cpus) for core in cores)


def _ordered_by_node(cores: Sequence[Core]) -> list[Core]:
    """Return the cores node by node as they come, within each as they are best taken."""
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.node, []).append(core)
    return [core for of_node in nodes.values() for core in _ordered(of_node)]


def _ordered(cores: Iterable[Core]) -> list[Core]:
    return sorted(cores, key=lambda core: (-len(core.cpus), -core.cpus[0]))


def _filled(groups: Iterable[list[Core]], count: int) -> tuple[int, ...]:
    """Return exactly `count` CPUs from groups of cores, earlier groups first; else none."""
    found: set[int] = set()
    for group in groups:
        for core in _ordered(group):
            if len(found.union(core.cpus)) <= count:
                found.update(core.cpus)
    return tuple(sorted(found)) if len(found) == count else ()


def usable(cores: Iterable[Core]) -> frozenset[int]:
    """Return all CPUs that tasks may use."""
    return frozenset(cpu for core in cores for cpu in core.cpus)


def shared(cores: Iterable[Core], own: Collection[int]) -> tuple[int, ...]:
    """Return the CPUs of those tasks that have none of their own."""
    return tuple(sorted(usable(cores).difference(own)))


def online(cores: Iterable[Core]) -> frozenset[int]:
    """Return all CPUs, also those that are not for tasks."""
    return frozenset(cpu for core in cores for cpu in (*core.cpus, *core.others))


def still_good(cores: Sequence[Core], own: Collection[int], count: int) -> bool:
    """Return whether CPUs chosen earlier are `count`, and still whole cores for tasks."""
    whole = frozenset(cpu for core in cores if core.whole for cpu in core.cpus)
    cut = any(0 < len(set(c.cpus) & set(own)) < len(c.cpus) for c in cores)
    return len(set(own)) == count and whole.issuperset(own) and not cut


def refusal(cores: Sequence[Core], taken: Taken, count: int, had: Collection[int] = ()) -> str:
    """Return why a task cannot have `count` CPUs of its own, with numbers; empty if it can."""
    everything, attempt = usable(cores), f"resources.exclusive_cpus {count}"
    sizes = {len(core.cpus) for core in cores if core.cpus and core.whole}
    if len(sizes) == 1 and count % (size := min(sizes)):
        less = count - count % size
        ask = f"ask for {less + size}" + (f" or {less}" if less else "")
        return f"{attempt} is no number of whole cores: each has {size} CPUs here; {ask}"
    if chosen(cores, taken.own | taken.pinned, count, had):
        if taken.sharing and len(everything - taken.own) <= count:
            others = f"{taken.sharing} other tasks" if taken.sharing > 1 else "another task"
            return f"{attempt} would leave no CPU of {len(everything)} for {others}"
        return ""
    words = [f"tasks may use {_cpus(everything)}"]
    words += [f"{_cpus(taken.own)} other tasks' own"] if taken.own else []
    words += [f"{_cpus(taken.pinned)} asked for by number"] if taken.pinned else []
    halves = frozenset(cpu for core in cores if not core.whole for cpu in core.cpus)
    words += [f"{_cpus(halves)} of cores that do other work, too"] if halves else []
    return f"{attempt} does not fit: {', '.join(words)}"


def _cpus(cpus: Set[int]) -> str:
    return f"{len(cpus)} CPUs ({listed(cpus)})" if len(cpus) != 1 else f"CPU {listed(cpus)}"


def sharing_refusal(cores: Iterable[Core], own: frozenset[int], pinned: Collection[int]) -> str:
    """Return why a task without CPUs of its own cannot run; `pinned` are those that it names."""
    if shared_out := sorted(own.intersection(pinned)):
        return f"resources.cpus: CPU {shared_out[0]} is another task's own"
    if own and not shared(cores, own):
        return f"all {len(own)} CPUs for tasks ({listed(own)}) are other tasks' own"
    return ""


def own_properties(own: Sequence[int]) -> dict[str, object]:
    """Return what keeps a unit on CPUs of its own; nothing for a task that has none."""
    return {"AllowedCPUs": tuple(own)} if own else {}


def allowed_cpus(
    own: Sequence[int], before: Resources | None, spec: TaskSpec, everything: Sequence[int]
) -> dict[str, object]:
    """Return what brings a running unit to the CPUs that it may use; `before` is what it has.

    A bound that is no longer asked for is lifted by naming all: systemd takes an empty list, and
    leaves the kernel's file as it is.
    """
    if own:
        return own_properties(own)
    lifted = before is not None and before.cpus and not spec.resources.cpus
    return {"AllowedCPUs": tuple(everything)} if lifted and everything else {}


def own_values(own: Sequence[int]) -> dict[str, str]:
    """Return the value of the cgroup file that must then be in force (cgroup-v2.rst)."""
    return {"cpuset.cpus.effective": listed(own)} if own else {}
