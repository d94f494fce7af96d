"""Containers inside a system container, by podman of Debian (docs/agent.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.images import SYSTEMD_TAR, busybox_image, make_systemd_image
from tests.lab.one_guest import OneGuest
from vm_lab.image.programs import build_program

GROUP = "/sys/fs/cgroup/workload.slice/workload-local.slice/twine-task-web.service"
VOLUMES = "/var/lib/twine/volumes/local"
TASK = """
stop_timeout_s = 20
[volumes.data]
kind = "persistent"
path = "/srv/data"
max_bytes = "64MiB"
[probe]
kind = "exec"
command = ["systemctl", "is-active", "--quiet", "hello.service"]
interval_s = 2
timeout_s = 60
start_period_s = 900
"""
LIMIT = 288 << 20
RUN = f"--relax own-init --network private --memory {LIMIT} --file /root/task.toml"
IMAGE = f"--image {SYSTEMD_TAR}"
PODMAN = """
exec systemd-run --quiet --wait --pipe --expand-environment=no -p Delegate=yes \\
    -E CONTAINERS_CONF=/srv/data/containers.conf \\
    podman --root /srv/data/podman --runroot /run/podman "$@"
"""
CONF = "[containers]\nkeyring = false\ndefault_sysctls = []\n"
USERS = "--uidmap 0:10000:5000 --gidmap 0:10000:5000"
CONTAINER = f"sh /srv/data/podman.sh run --rm --network=host {USERS}"
OWN_PROC = "unshare --user --map-root-user --mount --pid --fork --mount-proc"
SEEN = "echo me: /proc/[0-9]*; cat /proc/self/uid_map"
DAEMON = "setpriv --reuid daemon --regid daemon --clear-groups"
SAYS = "/bin/busybox sh -c 'busybox echo hello from $((6 * 7)); busybox cat /proc/self/uid_map'"
EATS = "/bin/busybox tail /dev/zero"
LEFT = (
    "grep -c /run/twine/machines /proc/self/mountinfo;"
    " find /run/twine/machines /run/systemd/nspawn -mindepth 1;"
    f" ls -d /tmp/nspawn* {GROUP}; pgrep -f 'con[m]on|98[7]65'"
)


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="nested")
    found.up()
    podman = build_program("podman", print).read_bytes()
    for name, tar in (("podman", podman), ("plain", busybox_image())):
        found.put(f"/root/{name}.tar", tar)
    make_systemd_image(found, podman="/root/podman.tar")
    found.put("/root/task.toml", TASK)
    found.ssh("systemctl start twine-network.socket twine-agent.service", timeout_s=900)
    for name, relax in (("web", "--relax nested"), ("bare", "")):
        found.ssh(f"twine-agent run {name} {relax} {RUN} {IMAGE}", timeout_s=1800)
        found.put(f"{VOLUMES}/{name}.data/podman.sh", PODMAN)
        found.put(f"{VOLUMES}/{name}.data/containers.conf", CONF)
        found.ssh(f"cp /root/plain.tar {VOLUMES}/{name}.data/")
        inside(found, "sh /srv/data/podman.sh import --quiet /srv/data/plain.tar inner:1", name)
    yield found
    found.down()


def inside(guest: OneGuest, command: str, task: str = "web") -> str:
    return guest.ssh(f"twine-agent exec {task} -- {command} 2>&1 || true", timeout_s=900).strip()


def events(guest: OneGuest, name: str) -> int:
    """Return how often the kernel reported this event for the memory of the task and all below."""
    return int(guest.ssh(f"sed -n 's/^{name} //p' {GROUP}/memory.events"))


def invocation(guest: OneGuest, task: str) -> str:
    return guest.find(f"systemctl show -P InvocationID twine-task-{task}.service")


@pytest.mark.behaviour("AG8", "F-83")
@pytest.mark.long
@pytest.mark.parametrize("user", ["", DAEMON, OWN_PROC])
def test_a_nested_namespace_has_its_own_proc_if_allowed(guest: OneGuest, user: str) -> None:
    """Root, other users and a further namespace get one; where it is not allowed there is none."""
    command = f'{user} {OWN_PROC} sh -c "{SEEN}"'
    first, *users = inside(guest, command).splitlines()
    assert first == "me: /proc/1"
    assert len(users) == 1
    assert "mount /proc failed" in inside(guest, command, "bare")


@pytest.mark.behaviour("AG8")
@pytest.mark.long
def test_cgroup_files_cannot_be_read_or_removed_from_inside(guest: OneGuest) -> None:
    """Files of the host and files of no process are both out of reach from inside."""
    assert "Permission denied" in inside(guest, "ls /run/twine-nested")
    assert "Permission denied" in inside(guest, "cat /run/twine-nested/proc/kallsyms")
    for place in ("", "/proc", "/sys"):
        assert "umount: /run/twine-nested" in inside(guest, f"umount -l /run/twine-nested{place}")
    assert inside(guest, "grep -c twine-nested /proc/self/mountinfo") == "3"
    assert inside(guest, "grep -c twine-nested /proc/self/mountinfo", "bare") == "0"
    same = "grep -E '^Cap(Bnd|Eff)' /proc/1/status"
    assert inside(guest, same) == inside(guest, same, "bare"), "no right more"
    there = "ls -A /run/twine/machines/web/.nested/proc | grep -c '^[0-9]'; true"
    assert guest.ssh(there).strip() == "0"
    assert "all is accounted for" in guest.ssh("twine-agent fsck")


@pytest.mark.behaviour("AG4")
@pytest.mark.long
def test_podman_runs_a_container_with_a_user_namespace_if_allowed(
    guest: OneGuest,
) -> None:
    """The container runs from an image in podman's store, in the task's network and in a private
    one.
    """
    for network in ("host", "none"):
        command = f"sh /srv/data/podman.sh run --rm --network={network} {USERS} inner:1 {SAYS}"
        output, users = inside(guest, command).splitlines()
        assert output == "hello from 42"
        assert users.split() == ["0", "10000", "5000"]
    refused = inside(guest, f"{CONTAINER} inner:1 {SAYS}", "bare")
    assert "mount `proc` to `proc`: Operation not permitted" in refused


@pytest.mark.behaviour("AG8")
@pytest.mark.long
def test_a_container_inside_is_within_the_limits_of_its_task(guest: OneGuest) -> None:
    """The container ends at its limit and at the task's; other processes of the task run on."""
    limit = "--memory=40m inner:1 /bin/busybox cat /sys/fs/cgroup/memory.max"
    assert inside(guest, f"{CONTAINER} {limit}") == str(40 << 20)
    tasks = ("web", "bare")
    before = [invocation(guest, task) for task in tasks]
    for its_own in ("--memory=40m", ""):
        killed, full = events(guest, "oom_kill"), events(guest, "max")
        eats = f"sh -c '{CONTAINER} {its_own} inner:1 {EATS}; echo ended with $?'"
        assert inside(guest, eats) == "ended with 137"
        assert events(guest, "oom_kill") > killed
    assert events(guest, "max") > full, "the last one came as far as the task's limit"
    # The kernel lets allocations that must not fail exceed the limit: one page was observed.
    assert int(guest.ssh(f"cat {GROUP}/memory.peak")) <= LIMIT + (1 << 20)
    assert inside(guest, "systemctl is-active hello.service") == "active"
    assert [invocation(guest, task) for task in tasks] == before


@pytest.mark.behaviour("AG4", "AG8")
@pytest.mark.long
def test_a_deleted_task_leaves_nothing_of_its_container(guest: OneGuest) -> None:
    """No processes, cgroups or mounts are left, neither on the host nor in its accounts.

    The container ignores the stop signal, and systemd inside would wait for longer than the task
    may.
    """
    guest.until(
        "it is up", lambda: "running" in guest.find("twine-agent ps | grep '^web .*healthy'")
    )
    inside(guest, f"{CONTAINER} --detach inner:1 /bin/busybox sleep 98765")
    (pid,) = guest.ssh("pgrep -f '^/bin/busybox sleep 98[7]65'").split()
    assert GROUP.removeprefix("/sys/fs/cgroup") in guest.ssh(f"cat /proc/{pid}/cgroup")
    assert "all is accounted for" in guest.ssh("twine-agent fsck")
    for task in ("web", "bare"):
        guest.ssh(f"twine-agent stop {task}", timeout_s=1800)
    assert guest.ssh(f"({LEFT}) 2>/dev/null || true").split() == ["0"]
    assert "all is accounted for" in guest.ssh("twine-agent fsck")


@pytest.mark.behaviour("AG4")
@pytest.mark.long
def test_nested_without_its_other_relaxations_is_refused_with_the_reason(guest: OneGuest) -> None:
    run = "twine-agent run alone --relax nested --image /root/plain.tar -- /bin/sh 2>&1 || true"
    assert "nested requires own-init" in guest.ssh(run, timeout_s=900)
    assert "nested" in guest.ssh("twine-agent facts | grep ^capabilities")
