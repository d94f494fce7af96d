"""A host with systemd-oomd: the agent acts first, systemd-oomd last and with preferences (ADR
0122).

The memory shortage is that of test_2_memory_pressure.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.images import program_image
from tests.lab.one_guest import OneGuest
from tests.lab.test_2_memory_pressure import (
    FILE,
    MIB,
    MORE,
    PROMISE,
    SHORT,
    TASKS,
    evictions,
    held_bytes,
    tasks,
)
from vm_lab.image.programs import build_program

pytestmark = pytest.mark.long
PARTS = "./usr/bin/oomctl ./usr/lib/systemd ./usr/lib/sysusers.d ./usr/share/dbus-1"
INSTALL = f"""
set -e
tar -C / --keep-directory-symlink -xf /root/oomd.tar {PARTS}
systemd-sysusers
systemctl daemon-reload
systemctl reload dbus
mkdir -p /etc/systemd/oomd.conf.d
printf '[OOM]\\nDefaultMemoryPressureDurationSec=1s\\n' > /etc/systemd/oomd.conf.d/hasty.conf
systemctl enable --now systemd-oomd
systemctl start twine-network.socket twine-agent.service
"""
"""Debian's package setup, and an eager one of an operator; the slice has its own settings."""
HASTY = "ManagedOOMMemoryPressureLimit=10% ManagedOOMMemoryPressureDurationSec=1s"
SET = "systemctl set-property --runtime workload.slice"
NEVER_ENOUGH = 200
"""Memory limit of the slice of all tasks, in MiB: less than any two tasks hold, or `kept` alone."""
MARKS = """
import os, sys
root = "/sys/fs/cgroup/"
for group in sys.argv[1:]:
    print(group.rsplit("/", 1)[1], *sorted(n for n in os.listxattr(root + group) if "oomd_" in n))
"""


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneGuest]:
    found = OneGuest(name="oomd", cpus=1)
    found.up()
    oomd = build_program("systemd-oomd", print).read_bytes()
    made = program_image("memory_pressure.c", "pressed", tmp_path_factory.mktemp("image"))
    for name, tar in (("oomd", oomd), ("pressed", made)):
        found.put(f"/root/{name}.tar", tar)
    found.ssh(INSTALL, timeout_s=900)
    for name, (entitlement, held) in TASKS.items():
        found.put(f"/root/{name}.toml", PROMISE + MORE if name == "kept" else MORE)
        run = f"twine-agent run {name} --entitlement {entitlement} --image /root/pressed.tar"
        words = f"--memory {held + 40}MiB --file /root/{name}.toml -- /pressed {held} {FILE}"
        found.ssh(f"{run} {words}", timeout_s=900)
    yield found
    found.down()


def filled(guest: OneGuest) -> None:
    """Return once all tasks run and hold their memory."""
    full = sum(held for _, held in TASKS.values()) * MIB
    guest.ssh(f"{SET} MemoryHigh=infinity")
    guest.until("all run", lambda: {t["state"] for t in tasks(guest).values()} == {"running"})
    guest.until("all tasks have what they hold", lambda: held_bytes(guest) >= full)


def killed(guest: OneGuest) -> list[str]:
    """Return the kills that systemd-oomd reports."""
    journal = guest.ssh("journalctl -u systemd-oomd -o cat").splitlines()
    return [line for line in journal if line.startswith("Killed ")]


def marks(guest: OneGuest, *groups: str) -> dict[str, list[str]]:
    """Return the preferences that systemd-oomd reads at cgroups, by the name of their unit."""
    guest.put("/root/marks.py", MARKS)
    lines = guest.ssh(f"python3 /root/marks.py {' '.join(groups)}").splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines}


@pytest.mark.behaviour("AG8")
def test_systemd_oomd_watches_tasks_with_their_preferences(
    guest: OneGuest,
) -> None:
    """systemd-oomd never kills units that the host needs. A promise counts, also after a resize."""
    watched = [x.strip() for x in guest.ssh("oomctl").splitlines() if "Path: " in x]
    assert set(watched) == {"Path: /workload.slice"}
    assert "Memory Pressure Limit: 80.00%" in guest.ssh("oomctl")
    assert "Memory Pressure Duration: 30s" in guest.ssh("oomctl")
    ours = guest.ssh("cd /sys/fs/cgroup && echo hostcritical.slice/*.service").split()
    assert "hostcritical.slice/twine-agent.service" in ours
    assert set(map(tuple, marks(guest, *ours).values())) == {("user.oomd_omit",)}

    kept, big = (
        f"workload.slice/workload-{TASKS[name][0]}.slice/twine-task-{name}.service"
        for name in ("kept", "big")
    )
    assert list(marks(guest, kept, big).values()) == [["user.oomd_avoid"], []]
    guest.ssh("twine-agent resize kept --memory 260MiB")
    guest.until("it is omitted", lambda: marks(guest, kept).popitem()[1] == ["user.oomd_omit"])
    guest.ssh("twine-agent resize kept --memory 280MiB")
    guest.until("as before", lambda: marks(guest, kept).popitem()[1] == ["user.oomd_avoid"])


@pytest.mark.behaviour("AG8")
def test_the_agent_acts_first_and_systemd_oomd_not_at_all(guest: OneGuest) -> None:
    """The agent evicts the task that its own rule selects, whatever oomd.conf has."""
    filled(guest)
    guest.ssh(f"{SET} MemoryHigh={SHORT}M")
    guest.until("one is evicted", lambda: bool(evictions(guest)))
    filled(guest)
    (why,) = evictions(guest)
    assert "task big: " in why
    assert killed(guest) == []


@pytest.mark.behaviour("AG8", "F-14")
def test_a_kill_by_systemd_oomd_is_reported_and_the_agent_kills_no_other_task(
    guest: OneGuest,
) -> None:
    """systemd-oomd is faster here; `kept` has a promise and is not killed."""
    filled(guest)
    before, evicted = tasks(guest), evictions(guest)
    guest.ssh(f"{SET} {HASTY}; {SET} MemoryHigh={NEVER_ENOUGH}M")
    stepped_back = "journalctl -u twine-agent -o cat | grep 'memory is short' || true"
    guest.until("the agent steps back", lambda: "freed memory" in guest.ssh(stepped_back))
    guest.ssh(f"{SET} ManagedOOMMemoryPressureLimit=80%")
    filled(guest)

    journal = killed(guest)
    assert journal
    assert evictions(guest) == evicted
    after = tasks(guest)
    more = {name for name in after if after[name]["restarts"] != before[name]["restarts"]}
    assert more == {line.split()[1].rpartition("-")[2].partition(".")[0] for line in journal}
    assert "kept" not in more
    for name in more:
        assert after[name]["last_exit"]["result"] == "oomd-kill"  # type: ignore[index]
        events = [x for x in guest.ssh("twine-agent events").splitlines() if f"task {name}: " in x]
        why = "systemd-oomd killed it, since its host was short of memory: memory pressure for"
        assert any(f"{why} /workload.slice being " in line for line in events), events
    assert "Out of memory" not in guest.ssh("journalctl -k -o cat")
    assert "all is accounted for" in guest.ssh("twine-agent fsck")
