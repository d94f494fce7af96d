"""The objects on a host are compared with the agent's records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.api import TaskState
from agent.host.core.census import FoundOnHost, SubvolumeStore, account_for, confirmed
from agent.tasks.core.reconcile import KnownTask

IMAGE = "1" * 64
RUNNING = KnownTask(TaskState.RUNNING, image=f"sha256:{IMAGE}", ports="80-8080")
WELL = FoundOnHost(
    tasks={"web": RUNNING},
    records=("web.json", "gone.json"),
    units={"twine-task-web.service": "active", "twine-agent.service": "active"},
    cgroups=("/workload.slice/workload-x.slice/twine-task-web.service",),
    roots=("web",),
    images=SubvolumeStore((IMAGE,), (IMAGE,)),
    namespaces=("web",),
    veths={"tw01234567890": "web"},
    ports=("80-8080", "none"),
    mounts=(
        "/run/twine/netns/web",
        "/run/twine/machines/web/.root",
        "/run/twine/machines/web/.nested/proc",
        "/var/lib/twine/tasks/web",
        "/var/lib/twine/tasks/web/data",
    ),
    files=("images", "journal", "tasks"),
)


def wrong(found: FoundOnHost) -> list[tuple[str, str]]:
    return [(a.kind, a.name) for a in account_for(found) if a.wrong]


def test_a_healthy_host_has_an_owner_and_a_reason_for_every_object() -> None:
    accounts = account_for(WELL)
    assert wrong(WELL) == []
    assert all(a.owner and a.why and a.stays for a in accounts)
    assert {a.kind for a in accounts} == {
        "unit",
        "cgroup",
        "root",
        "image",
        "record",
        "namespace",
        "veth",
        "ports",
        "mount",
        "file",
    }


def test_a_mount_in_the_root_of_a_task_belongs_to_the_task_and_is_an_error_after_its_removal() -> (
    None
):
    at = "/var/lib/twine/tasks/web/srv/tasks/x"
    found = replace(WELL, mounts=(at,))
    (mount,) = [a for a in account_for(found) if a.kind == "mount"]

    assert (mount.owner, mount.why, mount.stays) == ("task web", "a volume of the task", True)
    gone = replace(found, tasks={}, unreadable=())
    assert ("mount", at) in wrong(gone)
    assert ("mount", at) not in wrong(replace(gone, unreadable=("web",)))


def test_a_port_gate_belongs_to_all_tasks_with_its_ports_and_is_removed_with_the_last() -> None:
    """A remaining gate is no error: the next request for other gates removes it."""
    both = replace(WELL, tasks={"web": RUNNING, "also": RUNNING}, ports=("80-8080", "9"))
    shared, left = [a for a in account_for(both) if a.kind == "ports"]

    assert (shared.owner, shared.stays) == ("agent", True)
    assert "also and 1 more" in shared.why
    assert (left.stays, left.wrong) == (False, False)


UNKNOWN_THINGS = {
    "unit": {"units": {**WELL.units, "twine-task-lost.service": "active"}},
    "unit of a step": {"units": {**WELL.units, "twine-step-lost.service": "active"}},
    "unit inside": {"units": {**WELL.units, "twine-in-lost.probe.service": "active"}},
    "image_import": {"units": {**WELL.units, "twine-unpack-0123.service": "active"}},
    "cgroup": {"cgroups": (*WELL.cgroups, "/workload.slice/x.slice/twine-task-lost.service")},
    "root": {"roots": ("web", "lost")},
    "namespace": {"namespaces": ("web", "lost")},
    "veth": {"veths": {**WELL.veths, "tw1": "lost"}},
    "veth without a name": {"veths": {**WELL.veths, "tw1": ""}},
    "mount": {"mounts": ("/var/lib/twine/tasks/x",)},
    "mount of a machine": {"mounts": ("/run/twine/machines/lost/.root",)},
    "mount below one of a machine": {"mounts": ("/run/twine/machines/lost/.nested/proc",)},
    "staging": {"staging": ("x.stream",)},
    "image without a description": {"images": SubvolumeStore((IMAGE, "2"), (IMAGE,))},
    "description without an image": {"images": SubvolumeStore((IMAGE,), (IMAGE, "2"))},
    "image that is open": {"images": SubvolumeStore((IMAGE,), (IMAGE,), (IMAGE,))},
    "layer": {"layers": SubvolumeStore(("3",), ())},
    "half a record": {"records": (*WELL.records, ".web.new")},
    "file": {"files": (*WELL.files, "core")},
    "file among roots": {"files": (*WELL.files, "tasks/x")},
    "no unit": {"units": {}},
    "unit that ended": {"units": {"twine-task-web.service": "failed"}},
    "no root": {"roots": ()},
    "no image": {"images": SubvolumeStore()},
    "no record": {"records": ()},
}


@pytest.mark.parametrize("kind", UNKNOWN_THINGS)
def test_every_unowned_and_every_missing_object_is_found_and_nothing_else(kind: str) -> None:
    """Covers objects without an owner, and missing objects (P9)."""
    found = replace(WELL, **UNKNOWN_THINGS[kind])
    assert len(wrong(found)) == 1
    assert all(a.why for a in account_for(found))


def test_work_in_progress_is_not_reported_as_a_fault() -> None:
    busy = replace(
        WELL,
        is_receiving=True,
        staging=("x.stream",),
        images=SubvolumeStore((IMAGE, "2"), (IMAGE,)),
        units={**WELL.units, "twine-fetch-0123.service": "active"},
    )
    leaving = {"web": KnownTask(TaskState.STOPPING, leaving=True)}
    assert wrong(busy) == []
    assert wrong(replace(WELL, tasks=leaving, units={}, roots=())) == []
    for state in (TaskState.STARTING, TaskState.BACKOFF, TaskState.FAILED):
        tasks = {"web": KnownTask(state)}
        assert wrong(replace(WELL, tasks=tasks, units={}, roots=())) == []


@pytest.mark.behaviour("F-06")
def test_a_task_whose_record_cannot_be_read_keeps_its_objects_and_is_reported() -> None:
    kept = replace(WELL, tasks={}, unreadable=("web",), mounts=())
    assert wrong(kept) == [("record", "web.json")]


@pytest.mark.behaviour("F-06")
def test_mounts_in_a_root_are_of_its_task_whether_or_not_its_record_can_be_read() -> None:
    """Covers a root that is mapped for its image's user, and volumes in it."""
    at = ("/tasks/state/tasks/web", "/tasks/state/tasks/web/srv/tasks/x")
    for here in (replace(WELL, mounts=at), replace(WELL, tasks={}, unreadable=("web",), mounts=at)):
        root, volume = [a for a in account_for(here) if a.kind == "mount"]
        assert (root.owner, volume.owner) == ("task web", "task web")
        assert "user of its image" in root.why
        assert "volume" in volume.why
    gone = replace(WELL, tasks={}, records=(), mounts=("/state/tasks/web", "/web"))
    assert [n for k, n in wrong(gone) if k == "mount"] == ["/state/tasks/web", "/web"]


def test_only_a_fault_seen_twice_is_reported() -> None:
    first, again = (
        account_for(replace(WELL, roots=("web", "lost", "old"))),
        account_for(replace(WELL, roots=("web", "old", "new"))),
    )
    assert [a.name for a in confirmed(first, again) if a.wrong] == ["old"]
    assert {a.name for a in confirmed(first, again)} == {a.name for a in again}
