"""A host whose tasks wait for memory evicts one of them, the right one, with a reason (ADR 0077).

The kernel makes tasks wait as on a host that is short of memory. Above `memory.high` of the slice
of all tasks, each allocation has to reclaim memory first, and without swap there is none. A program
outside the tasks that took the memory caused the kernel's OOM killer in several tries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab.images import program_image
from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.long
MIB = 1 << 20
TASKS = {"big": ("shop", 260), "small": ("shop", 60), "kept": ("bank", 240)}
"""Name of each task → its entitlement, and the memory that it holds, in MiB."""
SHORT = 400
"""Memory limit of the slice of all tasks, in MiB: less than all hold, more than two of them do."""
FILE = 8
MORE = f"""
[volumes.data]
kind = "persistent"
path = "/srv"
max_bytes = "{3 * FILE}MiB"
"""
PROMISE = '[resources]\nmemory_min_bytes = "260MiB"\n'


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneGuest]:
    found = OneGuest(name="pressure", cpus=1)
    found.up()
    made = program_image("memory_pressure.c", "pressed", tmp_path_factory.mktemp("image"))
    found.put("/root/pressed.tar", made)
    found.ssh("systemctl start twine-network.socket twine-agent.service", timeout_s=900)
    for name, (entitlement, held) in TASKS.items():
        found.put(f"/root/{name}.toml", PROMISE + MORE if name == "kept" else MORE)
        run = f"twine-agent run {name} --entitlement {entitlement} --image /root/pressed.tar"
        words = f"--memory {held + 40}MiB --file /root/{name}.toml -- /pressed {held} {FILE}"
        found.ssh(f"{run} {words}", timeout_s=900)
    yield found
    found.down()


def held_bytes(guest: OneGuest) -> int:
    """Return the memory of all tasks together."""
    return int(guest.ssh("cat /sys/fs/cgroup/workload.slice/memory.current"))


def tasks(guest: OneGuest) -> dict[str, dict[str, object]]:
    """Return the tasks by name; returns only if the agent has answered."""
    found = json.loads(guest.ssh("twine-agent ps -o json"))
    return {task["task_id"]: task for task in found["tasks"]}


def evictions(guest: OneGuest) -> list[str]:
    """Return the agent's events about evicted tasks."""
    events = guest.ssh("twine-agent events").splitlines()
    return [line for line in events if "evicted" in line]


@pytest.mark.behaviour("AG8")
def test_the_task_goes_that_has_most_beyond_its_promise_and_its_neighbours_run_on(
    guest: OneGuest,
) -> None:
    """`kept` holds nearly as much, all of it promised; `small` shares the entitlement."""
    full = sum(held for _, held in TASKS.values()) * MIB
    guest.until("all tasks have what they hold", lambda: held_bytes(guest) >= full)
    assert not evictions(guest)

    guest.ssh(f"systemctl set-property --runtime workload.slice MemoryHigh={SHORT}M")
    guest.until("one is evicted", lambda: bool(evictions(guest)))
    guest.ssh("systemctl set-property --runtime workload.slice MemoryHigh=infinity")
    guest.until("it runs again", lambda: tasks(guest)["big"]["state"] == "running")

    (why,) = evictions(guest)
    assert "task big: " in why
    assert "% of the last 10 s all tasks of the host were stalled by lack of memory" in why
    assert "in the entitlement that used the most (shop)" in why
    assert {name: task["restarts"] for name, task in tasks(guest).items()} == {
        "big": 1,
        "small": 0,
        "kept": 0,
    }
    journal = guest.ssh("journalctl -u twine-agent -o cat")
    assert "task big: running → " in journal
    assert "it was evicted" in journal
    assert "Out of memory" not in guest.ssh("journalctl -k -o cat")
    assert "all is accounted for" in guest.ssh("twine-agent fsck")
