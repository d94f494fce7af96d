"""Tasks with exclusive CPUs on a real kernel and a real systemd (AG8, docs/resources.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.images import busybox_image
from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.behaviour("AG8")

SLEEP = "-- /bin/busybox sleep 100000"
OWN = "[resources]\nexclusive_cpus = {}\n"
GROUPS = "/sys/fs/cgroup/workload.slice/"


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="cpus", cpus=4)
    found.up()
    found.put("/root/image.tar", busybox_image())
    for count in range(1, 5):
        found.put(f"/root/own-{count}.toml", OWN.format(count))
    found.ssh("systemctl start twine-agent.service", timeout_s=900)
    yield found
    found.down()


def run(guest: OneGuest, name: str, own: int = 0, more: str = "") -> str:
    file = f"--file /root/own-{own}.toml" if own else ""
    return guest.ssh(
        f"twine-agent run {name} --image /root/image.tar {file} {more} {SLEEP} 2>&1 || true",
        timeout_s=900,
    )


def expect_cpus(guest: OneGuest, name: str, cpus: str) -> None:
    """Wait until a task reports these CPUs as its own."""
    guest.ssh(
        f"for i in $(seq 300); do twine-agent show {name} | grep -Eq 'own CPUs +{cpus}( |$)' &&"
        f" exit; sleep 1; done; twine-agent show {name}; journalctl -u twine-agent -n 40; exit 1",
        timeout_s=900,
    )


def kernel(guest: OneGuest, group: str) -> str:
    """Return the CPUs that the kernel lets a cgroup run on, and its processes."""
    allowed = guest.ssh(f"cat '{GROUPS}{group}/cpuset.cpus.effective'").strip()
    masks = guest.ssh(
        f"for pid in $(find '{GROUPS}{group}' -name cgroup.procs -exec cat {{}} +); do"
        " sed -n 's/^Cpus_allowed_list:.//p' /proc/$pid/status; done | sort -u"
    ).split()
    assert masks in ([allowed], []), (group, allowed, masks)
    return allowed


OWN_DB = "workload-local_own.slice/twine-task-db.service"


@pytest.mark.behaviour("AG8")
@pytest.mark.long
def test_exclusive_cores_hold_and_are_returned(guest: OneGuest) -> None:
    """Other tasks leave the cores of a task before it starts there. This holds through a kill of
    the agent, a resize and the task's end. A task that does not fit is refused with the numbers.
    """
    run(guest, "web")
    run(guest, "db", own=2)
    expect_cpus(guest, "db", "2-3")
    assert kernel(guest, OWN_DB) == "2-3"
    assert kernel(guest, "workload-local.slice") == "0-1"
    assert "would leave no CPU of 4 for another task" in run(guest, "more", own=2)
    assert "tasks may use 4 CPUs (0-3), 2 CPUs (2-3) exclusive CPUs of other tasks" in run(
        guest, "more", own=3
    )

    ran = guest.ssh("systemctl show -P InvocationID twine-task-db.service")
    guest.ssh("systemctl kill -s KILL twine-agent.service; systemctl start twine-agent.service")
    expect_cpus(guest, "db", "2-3")
    run(guest, "late", more="--entitlement late")
    assert kernel(guest, "workload-late.slice") == "0-1"

    guest.ssh("twine-agent resize db --exclusive-cpus 3", timeout_s=900)
    expect_cpus(guest, "db", "1-3")
    assert kernel(guest, OWN_DB) == "1-3"
    assert kernel(guest, "workload-local.slice") == kernel(guest, "workload-late.slice") == "0"
    assert guest.ssh("systemctl show -P InvocationID twine-task-db.service") == ran
    assert "CPUs 1-3 are its own" in guest.ssh("journalctl -u twine-agent --no-pager")

    guest.ssh("twine-agent stop db", timeout_s=900)
    assert kernel(guest, "workload-local.slice") == kernel(guest, "workload-late.slice") == "0-3"
    run(guest, "pin", own=1)
    expect_cpus(guest, "pin", "3")
