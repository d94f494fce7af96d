"""Volumes of a task on a real systemd and a real btrfs (AG9, docs/volumes.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.images import busybox_image
from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.behaviour("AG9")

TASK = """
[volumes.data]
kind = "persistent"
path = "/data"
max_bytes = "16MiB"
[volumes.work]
path = "/own"
[volumes.cache]
kind = "tmpfs"
path = "/cache"
max_bytes = "2MiB"
"""
SCRIPT = """b=/bin/busybox
echo run >> /data/runs; $b touch /own/here /cache/here
$b dd if=/dev/zero of=/data/big bs=1M count=32 2>/dev/null
echo data: $(($($b stat -c %s /data/big) >> 20)) of 32; $b rm /data/big
$b dd if=/dev/zero of=/cache/big bs=1M count=4 2>/dev/null
echo cache: $(($($b stat -c %s /cache/big) >> 20)) of 4
echo mine: $($b stat -c %u /data/runs) $($b id -u)
$b touch /outside || echo root: read only
echo runs: $($b wc -l < /data/runs)
exec $b sleep 100000"""


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="volumes")
    found.up()
    found.put("/root/image.tar", busybox_image())
    found.put("/root/linked.tar", busybox_image("data"))
    found.put("/root/task.toml", TASK)
    found.put("/root/script", SCRIPT)
    found.ssh("systemctl start twine-agent.service", timeout_s=900)
    yield found
    found.down()


def values_in_log(guest: OneGuest, runs: int) -> dict[str, str]:
    """Return the task's reports about its volumes once it has run this number of times."""
    guest.ssh(
        f"for i in $(seq 300); do twine-agent logs keep | grep -q 'runs: {runs}$' && exit;"
        " sleep 1; done; twine-agent ps; journalctl -u twine-task-keep --no-pager; exit 1"
    )
    lines = [line for line in guest.ssh("twine-agent logs keep").splitlines() if ": " in line]
    return dict(line.split(": ", 1) for line in lines if not line.startswith("twine-task"))


@pytest.mark.behaviour("AG9")
@pytest.mark.long
def test_volumes_keep_their_limits_and_contents(guest: OneGuest) -> None:
    """The kernel ends a write at the limit. The data survives a restart and an update."""
    run = (
        "twine-agent run keep --image /root/image.tar --file /root/task.toml"
        ' -- /bin/sh -c "$(cat /root/script)"'
    )
    guest.ssh(run, timeout_s=900)
    first = values_in_log(guest, 1)
    full, of = first["data"].split(" of ")
    assert (int(full) <= 16, of) == (True, "32"), first
    assert first["cache"] == "2 of 4"
    assert len(set(first["mine"].split())) == 1
    assert first["root"] == "read only"
    seen = guest.ssh("twine-agent exec keep -- /bin/busybox ls /data /own /cache")
    assert seen.split() == ["/cache:", "big", "here", "/data:", "runs", "/own:", "here"]

    assert "all is accounted for" in guest.ssh("twine-agent fsck")
    guest.ssh("twine-agent restart keep", timeout_s=900)
    assert values_in_log(guest, 2)["mine"].split()[0] != "0"
    guest.ssh("twine-agent volume snapshot keep.data")
    guest.ssh("twine-agent stop keep", timeout_s=900)
    left = guest.ssh("twine-agent volume list")
    assert "keep.work" not in left
    assert left.count("keep.data") == 2
    assert guest.ssh("grep -c twine/tasks /proc/self/mountinfo || true").strip() == "0"
    assert "all is accounted for" in guest.ssh("twine-agent fsck")
    assert guest.ssh("ls -d /data /own /cache 2>/dev/null || true") == ""

    guest.ssh(run, timeout_s=900)
    values_in_log(guest, 3)
    guest.ssh("twine-agent stop keep", timeout_s=900)


@pytest.mark.behaviour("AG9", "F-84")
@pytest.mark.long
def test_an_image_with_a_link_in_place_of_a_volume_does_not_start(guest: OneGuest) -> None:
    """The volume would be mounted over the host's own folder."""
    before = guest.ssh("ls /etc | sha256sum")
    guest.ssh(
        "twine-agent run linked --image /root/linked.tar --file /root/task.toml"
        " -- /bin/sh -c 'echo in > /data/in' || true",
        timeout_s=900,
    )
    log = guest.ssh("twine-agent logs linked")
    assert "the image has a link on the way to /data" in log
    assert guest.ssh("ls /etc | sha256sum") == before
    guest.ssh("twine-agent stop linked", timeout_s=900)
