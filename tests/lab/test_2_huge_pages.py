"""Huge pages of tasks on a real kernel (AG8, docs/resources.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.images import program_image
from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.behaviour("AG8")

POOL = 8
GROUPS = "/sys/fs/cgroup/workload.slice"
PAGE = 2 << 20


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneGuest]:
    found = OneGuest(name="pages")
    found.up()
    made = program_image("huge_pages.c", "take", tmp_path_factory.mktemp("image"))
    found.put("/root/image.tar", made)
    for count in (3, 6):
        found.put(f"/root/{count}.toml", f"[resources]\nhugepages_2mib = {count}\n")
    found.ssh(
        f"echo {POOL} > /proc/sys/vm/nr_hugepages; systemctl start twine-agent.service",
        timeout_s=900,
    )
    assert found.ssh("cat /proc/sys/vm/nr_hugepages").strip() == str(POOL)
    yield found
    found.down()


def run(guest: OneGuest, name: str, pages: int = 0) -> str:
    file = f"--file /root/{pages}.toml" if pages else ""
    return guest.ssh(
        f"twine-agent run {name} --image /root/image.tar {file} -- /take 2>&1 || true",
        timeout_s=900,
    )


def log_of(guest: OneGuest, name: str) -> str:
    """Return the reported huge pages of a task, once its log has them."""
    return guest.ssh(
        f"for i in $(seq 300); do twine-agent logs {name} | grep -o 'pages: .*' && exit; sleep 1;"
        f" done; twine-agent show {name}; journalctl -u twine-agent -n 30; exit 1",
        timeout_s=900,
    ).strip()


def limit(guest: OneGuest, group: str) -> str:
    return guest.ssh(f"cat {GROUPS}/{group}/hugetlb.2MB.max {GROUPS}/{group}/hugetlb.2MB.rsvd.max")


@pytest.mark.behaviour("AG8")
@pytest.mark.long
def test_a_task_gets_the_pages_that_it_requested_and_others_none(guest: OneGuest) -> None:
    """The kernel enforces the limit from the first instruction on, and applies changes of it at
    once. A task that does not fit is refused with the numbers.
    """
    db = "workload-local_huge.slice/twine-task-db.service"
    run(guest, "db", pages=3)
    assert log_of(guest, "db") == "pages: 3, then Cannot allocate memory"
    assert limit(guest, db).split() == [str(3 * PAGE)] * 2
    assert "has 8 pages of 2MiB, and other tasks hold 3" in run(guest, "more", pages=6)

    run(guest, "web")
    assert log_of(guest, "web") == "pages: 0, then Cannot allocate memory"
    assert limit(guest, "workload-local.slice").split() == ["0", "0"]
    free = guest.ssh("sed -n 's/^HugePages_Free: *//p' /proc/meminfo").strip()
    assert free == str(POOL - 3)

    guest.ssh("systemctl daemon-reload; systemctl restart twine-agent.service", timeout_s=900)
    guest.ssh("twine-agent resize db --hugepages-2mib 5", timeout_s=900)
    guest.until("the limit is another one", lambda: limit(guest, db).split() == [str(5 * PAGE)] * 2)
    assert limit(guest, "workload-local.slice").split() == ["0", "0"]

    guest.ssh("twine-agent stop db", timeout_s=900)
    guest.until(
        "others may have pages", lambda: limit(guest, "workload-local.slice").split()[0] == "max"
    )
    guest.ssh("twine-agent restart web", timeout_s=900)
    guest.until(
        "web takes them all", lambda: f"pages: {POOL}," in guest.find("twine-agent logs web")
    )
