"""Maximum write, read and send rates of a task, measured with the kernel's counters.

Each rate is the bytes of a kernel counter over the time between two readings of it. The guest first
shows that it can do several times as much, so a missing limit is detected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab.images import busybox_image
from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.long
MIB = 1 << 20
TOLERANCE = 1.15
"""Largest excess over the limit: the kernel grants slices of 100 ms, and counts begun requests."""
TIMES = 3
"""Least factor over its limit that a task must reach without the limit."""
DISK = """
[limits]
memory_max_bytes = "64MiB"
[volumes.data]
path = "/data"
"""
SLOW = """
[[resources.io]]
device = "/dev/vda"
{}_bytes_per_s = {}
"""
WRITES = "while :; do $b dd if=/dev/zero of=/data/big bs=1M count=16 conv=fsync; done"
READS = """$b dd if=/dev/zero of=/data/read bs=1M count=16 conv=fsync
while :; do $b dd if=/data/read of=/dev/null bs=256k iflag=direct; done"""
SENDS = "until $b nc {} 9000 </dev/zero; do $b sleep 1; done"
SINK = """import socket
s = socket.create_server(("0.0.0.0", 9000))
while True:
    c, _ = s.accept()
    while c.recv(1 << 20): pass
"""
SAMPLE = """import sys, time
def count():
    path, key = sys.argv[1], sys.argv[2]
    try:
        parts = open(path).read().split()
    except OSError:
        return 0
    if not key:
        return int(parts[0])
    return sum(int(w.partition("=")[2]) for w in parts if w.startswith(key + "="))
least, most_s = int(sys.argv[3]), float(sys.argv[4])
before, asked = count(), time.monotonic()
while count() == before:
    if time.monotonic() - asked > 120: sys.exit("nothing moves")
    time.sleep(0.05)
a, began = count(), time.monotonic()
while count() - a < least and time.monotonic() - began < most_s: time.sleep(0.05)
b, ended = count(), time.monotonic()
print((b - a) / (ended - began))
"""
"""Prints bytes a second over this number of bytes, from the first change of the counter on."""


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="rates")
    found.up()
    found.put("/root/image.tar", busybox_image())
    found.put("/root/sample.py", SAMPLE)
    found.put("/root/sink.py", SINK)
    found.ssh("systemctl start twine-network.socket twine-agent.service", timeout_s=900)
    yield found
    found.down()


def run(guest: OneGuest, name: str, script: str, *options: str) -> None:
    """Start a task, or set other limits of a running one."""
    guest.put(f"/root/{name}.sh", f"b=/bin/busybox\n{script}")
    line = f"twine-agent run {name} --image /root/image.tar {' '.join(options)}"
    guest.ssh(f'{line} -- /bin/sh -c "$(cat /root/{name}.sh)"', timeout_s=900)


def rate(guest: OneGuest, path: str, key: str, least_bytes: int) -> float:
    """Return bytes a second of a counter, over at least this number of bytes or 30 seconds."""
    options = f"{path} '{key}' {least_bytes} 30"
    return float(guest.ssh(f"/opt/twine/bin/python /root/sample.py {options}", timeout_s=300))


@pytest.mark.behaviour("AG8")
def test_a_task_reads_and_writes_at_most_at_its_device_limits(guest: OneGuest) -> None:
    """The task is as fast as before once the limit is removed, without a restart."""
    counter = "/sys/fs/cgroup/workload.slice/workload-local.slice/twine-task-disk.service/io.stat"
    for what, script, key in (("write", WRITES, "wbytes"), ("read", READS, "rbytes")):
        guest.put("/root/disk.toml", DISK)
        run(guest, "disk", script, "--file /root/disk.toml")
        free = rate(guest, counter, key, 32 * MIB)
        most = int(free / (2 * TIMES))
        guest.put("/root/disk.toml", DISK + SLOW.format(what, most))
        run(guest, "disk", script, "--file /root/disk.toml")
        # Requests that were running when the limit came still end as fast as they began.
        rate(guest, counter, key, 2 * most)
        held = rate(guest, counter, key, 10 * most)
        guest.put("/root/disk.toml", DISK)
        run(guest, "disk", script, "--file /root/disk.toml")
        rate(guest, counter, key, 2 * most)
        again = rate(guest, counter, key, 16 * MIB)
        print(f"{what}: {free:,.0f} B/s, limit {most:,}, held {held:,.0f}, again {again:,.0f}")
        assert 0 < held <= most * TOLERANCE
        assert again > TIMES * most
        (task,) = json.loads(guest.ssh("twine-agent ps -o json"))["tasks"]
        assert task["restarts"] == 0
    guest.ssh("twine-agent stop disk", timeout_s=900)


@pytest.mark.behaviour("AG8")
def test_a_limit_holds_for_every_name_of_its_device(guest: OneGuest) -> None:
    """systemd wrote the lifted limit of one name over that of another; the kernel then had none."""
    group = "/sys/fs/cgroup/workload.slice/workload-local.slice/twine-task-named.service"
    links = guest.ssh("ls -d /dev/disk/by-path/* /dev/disk/by-uuid/*").split()
    for rate, device in enumerate((links[0], "/dev/vda", links[-1], "/dev/vda", links[0]), 1):
        table = f'[[resources.io]]\ndevice = "{device}"\nwrite_bytes_per_s = {rate}000000\n'
        guest.put("/root/named.toml", table)
        run(guest, "named", "exec $b sleep 100000", "--file /root/named.toml")
        command = f"grep wbps={rate}000000 {group}/io.max"
        guest.until(f"{device} has its limit", lambda command=command: guest.find(command) != "")
    guest.put("/root/named.toml", table.replace(links[0], "/dev/disk/by-uuid/none"))
    line = "twine-agent run named --image /root/image.tar --file /root/named.toml"
    refused = guest.ssh(f"{line} -- /bin/busybox true 2>&1 || true")
    there = ", ".join(link for link in links if "/by-uuid/" in link)
    refusal = f"there is no block device /dev/disk/by-uuid/none; the machine has {there}"
    assert refusal in refused
    (task,) = json.loads(guest.ssh("twine-agent ps -o json"))["tasks"]
    assert task["restarts"] == 0
    guest.ssh("twine-agent stop named", timeout_s=900)


@pytest.mark.behaviour("AG8")
def test_a_private_task_sends_at_most_at_its_limit(guest: OneGuest) -> None:
    """The host's end of its link received the sent bytes."""
    guest.ssh("systemd-run --unit sink /opt/twine/bin/python /root/sink.py")
    host = guest.ssh("ip -4 -o addr show scope global").split()[3].partition("/")[0]
    link = "/sys/class/net/$(ls /sys/class/net | grep '^tw[0-9a-f]')/statistics/rx_bytes"
    run(guest, "free", SENDS.format(host), "--network private")
    free = rate(guest, link, "", 8 * MIB)
    guest.ssh("twine-agent stop free", timeout_s=900)
    most = free / (2 * TIMES)
    mbps = f"{most * 8 / 1e6:.3f}"
    run(guest, "bound", SENDS.format(host), f"--network private --egress-mbps {mbps}")
    held = rate(guest, link, "", int(10 * most))
    guest.ssh("twine-agent stop bound; systemctl stop sink", timeout_s=900)
    print(f"egress: {free:,.0f} B/s, limit {most:,.0f}, held {held:,.0f}")
    assert 0 < held <= most * TOLERANCE
    assert free > TIMES * held
