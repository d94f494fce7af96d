"""A task keeps its protected memory while its host is short of memory (ADR 0117)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.images import program_image
from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.long
HOG = Path(__file__).with_name("hog.py")
MIB = 1 << 20
GROUPS = "/sys/fs/cgroup/workload.slice"
SHOP, BANK = f"{GROUPS}/workload-shop.slice", f"{GROUPS}/workload-bank.slice"
OF = {"plain": SHOP, "kept": BANK}
HELD, FILE, LIMIT = 160, 64, 256
"""Anonymous memory of each task, its file, and its limit, in MiB."""
LOST = 16 * MIB
"""Least loss of a task without protection: 31 MiB and more were measured, and none with it."""
LEFT = 72
"""MiB left: the file of the unprotected task is reclaimed, and no process is killed."""
TASK = f"""
[limits]
memory_max_bytes = "{LIMIT}MiB"
[volumes.data]
kind = "persistent"
path = "/srv"
max_bytes = "{FILE * 3 // 2}MiB"
"""
PROMISE = f'[resources]\nmemory_min_bytes = "{LIMIT}MiB"\n'


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneGuest]:
    found = OneGuest(name="kept", cpus=1)
    found.up()
    made = program_image("memory_pressure.c", "pressed", tmp_path_factory.mktemp("image"))
    found.put("/root/pressed.tar", made)
    found.put("/root/hog.py", HOG.read_text())
    found.put("/root/plain.toml", TASK)
    found.put("/root/kept.toml", PROMISE + TASK)
    found.ssh("systemctl start twine-network.socket twine-agent.service", timeout_s=900)
    for name, entitlement in (("plain", "shop"), ("kept", "bank")):
        run = f"twine-agent run {name} --entitlement {entitlement} --image /root/pressed.tar"
        words = f"--memory {LIMIT}MiB --file /root/{name}.toml -- /pressed {HELD} {FILE}"
        found.ssh(f"{run} {words}", timeout_s=900)
    yield found
    found.down()


def memory(guest: OneGuest) -> dict[str, int]:
    """Return the memory of each task."""
    paths = " ".join(f"{group}/twine-task-{name}.service" for name, group in OF.items())
    read = guest.ssh(f"for at in {paths}; do cat $at/memory.current; done").split()
    return dict(zip(OF, map(int, read), strict=True))


def keeps(guest: OneGuest) -> list[int]:
    """Return the protected memory of the slice of all tasks, and of each task."""
    return [int(guest.ssh(f"cat {group}/memory.min")) for group in (GROUPS, SHOP, BANK)]


@pytest.mark.behaviour("AG8")
def test_a_task_keeps_its_protected_memory_while_its_neighbour_is_reclaimed(
    guest: OneGuest,
) -> None:
    """The kernel counts it; the protection ends with the task."""
    full = (HELD + FILE) * MIB
    guest.until("both have all", lambda: min(memory(guest).values()) >= full)
    assert keeps(guest) == [LIMIT * MIB, 0, LIMIT * MIB]
    before = memory(guest)

    hog = "systemd-run -q --unit=hog -p StandardOutput=truncate:/run/hog"
    guest.ssh(f"{hog} /usr/bin/python3 /root/hog.py {LEFT}")
    guest.until("the host is short", lambda: "held" in guest.find("cat /run/hog"))
    after = memory(guest)
    print({name: (before[name] // MIB, after[name] // MIB) for name in OF})

    assert before["plain"] - after["plain"] > LOST, "there was something to lose"
    assert before["kept"] - after["kept"] < MIB
    tasks = json.loads(guest.ssh("twine-agent ps -o json"))["tasks"]
    states = {t["task_id"]: (t["state"], t["restarts"]) for t in tasks}
    assert states == dict.fromkeys(OF, ("running", 0))
    assert guest.ssh("journalctl -k | grep -c 'Killed process' || true").strip() == "0"

    guest.ssh("systemctl stop hog; twine-agent stop kept", timeout_s=900)
    guest.until("it is given back", lambda: int(guest.ssh(f"cat {GROUPS}/memory.min")) == 0)
