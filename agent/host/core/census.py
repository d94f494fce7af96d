"""Compares the objects on a host with the records: finds the owner of each, and errors.

Pure. `host/gc.py` inspects the host and calls this. It inspects twice, so that changes in progress
do not count as errors, and repairs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec.structs import replace

from agent.api import TaskState
from agent.api.accounts import Account
from agent.api.ranges import ID_MAX, bounded
from agent.images.core.retention import RetentionDecision
from agent.tasks.core.reconcile import KnownTask
from agent.volumes.core.volumes import read_name

_TASK_UNIT = re.compile(
    r"twine-(?:task|step)-(?P<task>[a-z0-9-]+)\.service|twine-in-(?P<inside>[a-z0-9-]+)\..+\.service"
)
_FETCH_UNIT = re.compile(r"twine-(unpack|fetch)-[0-9a-f]+\.service")
_AGENT_FILES = {
    "agent.lock": "the lock that allows one agent only",
    "clock": "the clocks when the ages of images were last counted",
    "identity": "the identity of this host, with its keys",
    "images": "images",
    "journal": "records of tasks",
    "layers": "layers of images",
    "reserve": "space that is reserved for records on a full disk",
    "reserve.new": "the same, while it is being reserved",
    "scratch": "volumes that go with their tasks",
    "sidekick": "the host profile's state",
    "staging": "images that are being received",
    "tasks": "root file systems of tasks",
    "volumes": "volumes of tasks",
}


@dataclass(frozen=True, slots=True)
class SubvolumeStore:
    """The subvolumes of a folder and their description files, by digits of the digest."""

    subvolumes: Collection[str] = ()
    described: Collection[str] = ()
    open: Collection[str] = ()
    """Subvolumes that can be written although they must not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOnHost:
    """Everything that one inspection found on a host."""

    tasks: Mapping[str, KnownTask] = field(default_factory=dict)
    unreadable: Collection[str] = ()
    """Tasks whose record cannot be read."""
    records: Collection[str] = ()
    """Files of the journal."""
    units: Mapping[str, str] = field(default_factory=dict)
    """Unit → its active state in systemd."""
    cgroups: Collection[str] = ()
    roots: Collection[str] = ()
    scratch: Collection[str] = ()
    """Volumes that are removed with their tasks, by name."""
    volumes: Collection[str] = ()
    """Persistent volumes and their snapshots, as `ENTITLEMENT/NAME`."""
    images: SubvolumeStore = SubvolumeStore()
    layers: SubvolumeStore = SubvolumeStore()
    staging: Collection[str] = ()
    is_receiving: bool = False
    """Whether an image is being received now."""
    namespaces: Collection[str] = ()
    ports: Collection[str] = ()
    """Programs for ports, by name (docs/adr/0112)."""
    veths: Mapping[str, str] = field(default_factory=dict)
    """Host end of a link → the task that its alias names."""
    mounts: Collection[str] = ()
    """Mounts below the state folder, by path, without the folder itself."""
    files: Collection[str] = ()
    """Unknown files in the state folder and in the folders of roots, images and layers."""
    bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    decisions: Mapping[tuple[str, str], RetentionDecision] = field(default_factory=dict)
    """Decision of retention for each image and layer."""


def account_for(found: FoundOnHost) -> list[Account]:
    """Return an account of each object, sorted by kind and name."""
    accounts = [
        *_unit_accounts(found),
        *_task_accounts("cgroup", _tasks_of(found.cgroups), found),
        *_task_accounts("root", {name: name for name in found.roots}, found),
        *_task_accounts("scratch", {name: name.partition(".")[0] for name in found.scratch}, found),
        *_volume_accounts(found),
        *_task_accounts("namespace", {name: name for name in found.namespaces}, found),
        *_task_accounts("veth", dict(found.veths), found),
        *_port_accounts(found),
        *_missing_accounts(found),
        *_store_accounts("image", found.images, found),
        *_store_accounts("layer", found.layers, found),
        *_staging_accounts(found),
        *_record_accounts(found),
        *(_mount_account(path, found) for path in found.mounts),
        *_file_accounts(found),
    ]
    # A file in the state folder can have any name.
    shown = (
        replace(a, name=bounded(a.name), owner=bounded(a.owner, ID_MAX), why=bounded(a.why))
        for a in accounts
    )
    return sorted(shown, key=lambda a: (a.kind, a.name))


def confirmed(first: Iterable[Account], again: Iterable[Account]) -> list[Account]:
    """Return the accounts of the second inspection; only errors of both count as errors."""
    before = {(a.kind, a.name, a.why) for a in first if a.wrong}
    return [
        a
        if not a.wrong or (a.kind, a.name, a.why) in before
        else Account(kind=a.kind, name=a.name, owner=a.owner, why="it is being changed")
        for a in again
    ]


def _tasks_of(units: Iterable[str]) -> dict[str, str]:
    found = {}
    for unit in units:
        match = _TASK_UNIT.fullmatch(unit.rpartition("/")[2])
        if match:
            found[unit] = match["task"] or match["inside"]
    return found


def _task_accounts(kind: str, things: Mapping[str, str], found: FoundOnHost) -> Iterator[Account]:
    """Yield accounts of objects that belong to tasks."""
    for name, task_id in things.items():
        size, owner = found.bytes.get((kind, name)), f"task {task_id}"
        if (task := found.tasks.get(task_id)) is not None:
            why = "the task is being removed" if task.leaving else "the task is here"
        elif task_id in found.unreadable:
            why = "the task's record cannot be read; its objects stay"
        else:
            owner, why = "", f"there is no task {task_id or '(none named)'}"
        yield _account(kind, name, owner, why, size)


def _account(kind: str, name: str, owner: str, why: str, size: int | None = None) -> Account:
    """Return the account of an object. An object without an owner is an error and is removed."""
    wrong = not owner
    return Account(
        kind=kind, name=name, owner=owner, stays=not wrong, why=why, bytes=size, wrong=wrong
    )


def _unit_accounts(found: FoundOnHost) -> Iterator[Account]:
    of_tasks = _tasks_of(found.units)
    yield from _task_accounts("unit", of_tasks, found)
    for unit in found.units:
        if unit in of_tasks:
            continue
        owner, why = "agent", "a service of the host"
        if _FETCH_UNIT.fullmatch(unit) and found.is_receiving:
            why = "it belongs to a running image fetch"
        elif _FETCH_UNIT.fullmatch(unit):
            owner, why = "", "no image is being fetched"
        yield _account("unit", unit, owner, why)


_RUNNING_STATES = ("active", "activating", "reloading", "deactivating")


def _missing_accounts(found: FoundOnHost) -> Iterator[Account]:
    """Yield accounts of missing objects."""
    for task_id, task in found.tasks.items():
        unit = f"twine-task-{task_id}.service"
        lacks = []
        if task.state is TaskState.RUNNING and not task.leaving:
            if found.units.get(unit) not in _RUNNING_STATES:
                lacks.append(f"its unit {unit}")
            if task_id not in found.roots:
                lacks.append("its root")
            present = {f"volumes/{v}" for v in found.volumes}
            present |= {f"scratch/{name}" for name in found.scratch}
            lacks += [f"its volume {place}" for place in task.volumes if place not in present]
            if task.image.removeprefix("sha256:") not in found.images.described:
                lacks.append(f"its image {task.image}")
        if f"{task_id}.json" not in found.records:
            lacks.append("its record")
        for lack in lacks:
            yield Account(
                kind="record",
                name=f"{task_id}: {lack}",
                owner=f"task {task_id}",
                why=f"task {task_id} is {task.state} and {lack} is missing",
                wrong=True,
            )


def _store_accounts(kind: str, store: SubvolumeStore, found: FoundOnHost) -> Iterator[Account]:
    for name in sorted({*store.subvolumes, *store.described}):
        owner, size = f"{kind} sha256:{name}", found.bytes.get((kind, name))
        present, described = name in store.subvolumes, name in store.described
        if present and described and name not in store.open:
            decision = found.decisions.get(
                (kind, f"sha256:{name}"), RetentionDecision(True, "it is complete")
            )
            stays, why = decision.stays, decision.why
            yield Account(kind=kind, name=name, owner=owner, stays=stays, why=why, bytes=size)
        elif found.is_receiving and not (present and described):
            yield Account(kind=kind, name=name, owner=owner, why="it is being received", bytes=size)
        else:
            why = "it is still writable" if present and described else "its description is missing"
            why = why if present else "only its description is there"
            yield Account(
                kind=kind, name=name, owner=owner, stays=False, why=why, bytes=size, wrong=True
            )


def _volume_accounts(found: FoundOnHost) -> Iterator[Account]:
    """Yield accounts of persistent volumes, which stay until a person removes them."""
    used = {place: t for t, task in found.tasks.items() for place in task.volumes}
    for name in found.volumes:
        named = read_name(name.partition("/")[2])
        size = found.bytes.get(("volume", name))
        if named is None:
            why = "the agent never creates such a name; examine it, then remove it by hand"
            yield Account(kind="volume", name=name, why=why, bytes=size, wrong=True)
            continue
        owner, why = f"task {named.task_id}", "the task is here"
        if named.label:
            why = f"a snapshot of {named.task_id}.{named.volume}; `twine-agent volume delete`"
        elif f"volumes/{name}" not in used:
            why = "no task here uses it; it is kept for a return of the task until it is removed"
        yield Account(kind="volume", name=name, owner=owner, why=why, bytes=size)


def _staging_accounts(found: FoundOnHost) -> Iterator[Account]:
    owner, why = "", "no image is being received"
    if found.is_receiving:
        owner, why = "agent", "an image is being received"
    for name in found.staging:
        yield _account("staging", name, owner, why, found.bytes.get(("staging", name)))


def _record_accounts(found: FoundOnHost) -> Iterator[Account]:
    for name in found.records:
        task_id = name.removesuffix(".json")
        if name.startswith("."):
            account = _account("record", name, "", "a write was interrupted")
        elif not name.endswith(".json"):
            owner = f"task {(of := name.partition('.')[0])}"
            now = "; the task has a record again" if of in found.tasks else ""
            why = f"it could not be read and is kept for diagnosis{now}"
            account = Account(kind="record", name=name, owner=owner, why=why)
        elif task_id in found.unreadable:
            why = "it cannot be read; put or delete the task to set it aside"
            account = Account(
                kind="record", name=name, owner=f"task {task_id}", why=why, wrong=True
            )
        else:
            why = "the task is here" if task_id in found.tasks else "the task is gone: a tombstone"
            account = Account(kind="record", name=name, owner=f"task {task_id}", why=why)
        yield account


def _port_accounts(found: FoundOnHost) -> Iterator[Account]:
    for name in found.ports:
        of = sorted(task_id for task_id, task in found.tasks.items() if task.ports == name)
        if of:
            more = f" and {len(of) - 1} more" if len(of) > 1 else ""
            why = f"the ports of its tasks: {of[0]}{more}"
        elif name == "none":
            why = "for tasks without ports"
        else:
            why = "it belongs to no task; it is removed when another task requests ports"
        owner = f"task {of[0]}" if len(of) == 1 else "agent"
        stays = bool(of) or name == "none"
        yield Account(kind="ports", name=name, owner=owner, stays=stays, why=why)


def _mount_account(path: str, found: FoundOnHost) -> Account:
    parts = path.split("/")
    for number, (folder, of_task) in enumerate(pairwise(parts), start=2):
        if folder == "tasks" and (of_task in found.tasks or of_task in found.unreadable):
            is_root = number == len(parts)  # a volume may be anywhere in it
            why = (
                "its root, as the user of its image sees it" if is_root else "a volume of the task"
            )
            return Account(kind="mount", name=path, owner=f"task {of_task}", why=why)
    name = path.rpartition("/")[2]
    if name in found.namespaces and name in found.tasks:
        return Account(kind="mount", name=path, owner=f"task {name}", why="its network namespace")
    if name == "netns":
        return Account(kind="mount", name=path, owner="agent", why="the folder of namespaces")
    of, machines, below = path.rpartition("/machines/")
    task, _, inner = below.partition("/")
    if of and machines and inner and task in found.tasks:
        why = "it belongs to a system container: its root or a volume"
        return Account(kind="mount", name=path, owner=f"task {task}", why=why)
    why = "no program of this host mounts anything there"
    return Account(kind="mount", name=path, stays=False, why=why, wrong=True)


def _file_accounts(found: FoundOnHost) -> Iterator[Account]:
    for name in found.files:
        top, _, inner = name.partition("/")
        if not inner and top in _AGENT_FILES:
            yield Account(kind="file", name=name, owner="agent", why=_AGENT_FILES[top])
        else:
            why = "the agent never creates such an object; examine it, then remove it by hand"
            yield Account(kind="file", name=name, why=why, wrong=True)
