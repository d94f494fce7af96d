"""A task with systemd inside: a system container with its own users, on a real kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from agent.tasks.core.own_init import FIRST_ID, ID_COUNT, SLOTS
from agent.volumes.core.volumes import OWNER
from tests.lab.images import SYSTEMD_TAR, busybox_image, make_systemd_image
from tests.lab.one_guest import OneGuest

UNIT = "twine-task-web.service"
GROUP = f"/sys/fs/cgroup/workload.slice/workload-local.slice/{UNIT}"
TASK = """
stop_timeout_s = 300
[volumes.data]
kind = "persistent"
path = "/srv/data"
max_bytes = "16MiB"
[probe]
kind = "exec"
command = ["systemctl", "is-active", "--quiet", "hello.service"]
interval_s = 2
timeout_s = 60
start_period_s = 900
[[life.init]]
name = "make"
command = ["sh", "-c", "echo $$ of $(id -u) >/srv/data/step"]
timeout_s = 300
"""
RUN = "twine-agent run web --relax own-init --network private --file /root/task.toml"
REACH = """
for file in /proc/sys/kernel/panic /proc/sysrq-trigger /sys/kernel/uevent_helper; do
    (echo 1 >$file) 2>/dev/null && echo open: $file
done
mknod /srv/data/disk b 254 0 2>/dev/null && echo open: mknod
mount /dev/vda /mnt 2>/dev/null && echo open: disk
kill -0 "$1" 2>/dev/null && echo open: processes
date -s 2001-01-01 >/dev/null 2>&1 && echo open: clock
ip link add x type dummy 2>/dev/null && echo open: network
echo closed: the rest
"""
NESTED = "unshare --user --map-root-user --mount --pid --fork --mount-proc true"
WRITE = (
    "touch /srv/data/root /srv/data/user; chown 33:33 /srv/data/user;"
    " stat -c '%n %u:%g' /srv/data/*; touch /kept && echo written"
)
TYPED = """
(echo 'stty size; test -t 0 && sleep 98764'
until pgrep -f '[s]leep 98764' >/dev/null; do sleep 1; done
printf '\\003'
echo 'echo after $?; exit 7') | COLUMNS=100 LINES=30 twine-agent exec -t web -- bash --norc
echo "ended with $?"
"""
DELETED = f"""
twine-agent exec web -- sh -c 'head -c 1G /dev/zero | tail' >/dev/null 2>&1 &
while grep -q '^oom_kill 0$' {GROUP}/memory.events; do sleep 0.2; done
curl -sf -X DELETE --unix-socket /run/twine/agent.sock http://agent/v1/tasks/web >/dev/null
"""
LEFT = (
    "grep -c /run/twine/machines /proc/self/mountinfo;"
    " find /run/twine/machines /run/systemd/nspawn -mindepth 1;"
    f" ls -d /tmp/nspawn* {GROUP}; pgrep -f '[s]ystemd-nspawn'"
)


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="own-init")
    found.up()
    make_systemd_image(found)
    found.put("/root/plain.tar", busybox_image())
    found.put("/root/task.toml", TASK)
    found.put("/root/reach", REACH)
    found.put("/root/typed", TYPED)
    found.put("/root/deleted", DELETED)
    found.ssh("systemctl start twine-network.socket twine-agent.service", timeout_s=900)
    found.ssh(
        "twine-agent run plain --image /root/plain.tar -- /bin/busybox sleep 100000", timeout_s=900
    )
    found.ssh(f"{RUN} --image {SYSTEMD_TAR}", timeout_s=1800)
    yield found
    found.down()


def inside(guest: OneGuest, command: str) -> str:
    return guest.ssh(f"twine-agent exec web -- {command} 2>&1 || true").strip()


def leader(guest: OneGuest) -> str:
    """Return the init process of the system container, as the host sees it."""
    return guest.ssh(f"head -n 1 {GROUP}/payload/init.scope/cgroup.procs").strip()


def invocation(guest: OneGuest, task: str) -> str:
    return guest.find(f"systemctl show -P InvocationID twine-task-{task}.service")


def up(guest: OneGuest) -> None:
    shown = re.compile(r"^web +running +healthy ", re.MULTILINE)
    guest.until("it is healthy", lambda: bool(shown.search(guest.find("twine-agent ps"))))


@pytest.mark.behaviour("AG4", "BUG-AG30")
@pytest.mark.long
def test_systemd_starts_inside_with_its_services_and_logs_it(
    guest: OneGuest,
) -> None:
    """A probe and a step run inside; the log has the lines of a service and of manual commands."""
    assert inside(guest, "systemctl is-system-running --wait") == "running"
    guest.until("its log", lambda: "hello: daemon in web" in guest.ssh("twine-agent logs web"))
    assert "healthy" in guest.ssh("twine-agent ps | grep '^web '")
    assert re.fullmatch(r"\d+ of 0", inside(guest, "cat /srv/data/step"))
    assert inside(guest, "hostname") == "web"
    limit = int(guest.ssh(f"cat {GROUP}/memory.max"))
    assert int(inside(guest, "df -B1 --output=size /dev/shm").split()[-1]) == limit // 2  # BUG-AG30
    assert inside(guest, "nosuch").endswith("no such program in the task")
    assert guest.ssh("twine-agent exec web -- sh -c 'exit 3'; echo $?").strip() == "3"
    guest.ssh("twine-agent exec web -- sh -c 'sleep 98765 & echo left'")
    guest.until("nothing is left", lambda: guest.find("pgrep -f 'sleep [9]8765' || echo") == "")
    assert "all is accounted for" in guest.ssh("twine-agent fsck")


@pytest.mark.behaviour("AG8", "F-83")
@pytest.mark.long
def test_root_inside_is_unprivileged_outside_and_cannot_reach_the_host(guest: OneGuest) -> None:
    """Checked by the kernel's user map, and by the owner of a file on a volume."""
    first, base, count = guest.ssh(f"cat /proc/{leader(guest)}/uid_map").split()
    assert (int(first), int(count)) == (0, ID_COUNT)
    assert FIRST_ID <= int(base) < FIRST_ID + SLOTS * ID_COUNT
    owners = guest.ssh(f"cat {GROUP}/payload/init.scope/cgroup.procs | xargs -n 1 ps -o uid= -p")
    assert {int(uid) for uid in owners.split()} == {int(base)}

    lines = inside(guest, f'sh -c "{WRITE}"').splitlines()
    assert {"/srv/data/root 0:0", "/srv/data/user 33:33", "written"} <= set(lines)
    files = guest.ssh("cd /var/lib/twine/volumes/local/web.data; stat -c '%n %u:%g' *").split("\n")
    assert {f"root {OWNER}:{OWNER}", f"user {OWNER + 33}:{OWNER + 33}"} <= set(files)
    assert not [line for line in files if line.endswith(":0")]

    main = guest.ssh("systemctl show -P MainPID twine-agent").strip()
    guest.ssh("cat /root/reach >/var/lib/twine/volumes/local/web.data/reach")
    assert inside(guest, f"sh /srv/data/reach {main}") == "closed: the rest"
    guest.ssh("rm /var/lib/twine/volumes/local/web.data/reach")
    rights = "grep CapBnd: /proc/self/status /proc/1/status"
    assert len({line.split()[-1] for line in inside(guest, rights).splitlines()}) == 1
    assert "mount /proc failed" in inside(guest, NESTED), "no container inside has a /proc"


@pytest.mark.behaviour("AG4")
@pytest.mark.long
def test_a_terminal_inside_has_a_size_and_interrupts_the_command(
    guest: OneGuest,
) -> None:
    """An interrupt ends the command but not the shell; later no process of either is left."""
    lines = guest.ssh("sh /root/typed", timeout_s=1800)
    assert "30 100" in lines, lines
    assert "after 130" in lines, lines
    assert lines.splitlines()[-1] == "ended with 7"
    guest.until("nothing is left", lambda: guest.find("pgrep -f '[s]leep 98764' || echo") == "")


@pytest.mark.behaviour("AG4")
@pytest.mark.long
def test_it_outlives_its_agent_and_is_resized_while_it_runs(guest: OneGuest) -> None:
    """A killed agent or a changed limit does not affect running processes."""
    before, main = leader(guest), guest.ssh("systemctl show -P MainPID twine-agent").strip()
    guest.ssh("systemctl kill -s KILL twine-agent.service")
    now = "systemctl show -P MainPID twine-agent"
    guest.until("another agent", lambda: guest.find(now) not in ("", "0", main))
    up(guest)
    guest.ssh("twine-agent resize web --memory 240MiB", timeout_s=900)
    limit = f"cat {GROUP}/memory.max"
    guest.until("its limit", lambda: guest.find(limit) == str(240 << 20))
    assert leader(guest) == before
    assert inside(guest, "systemctl is-system-running") == "running"


@pytest.mark.behaviour("AG8")
@pytest.mark.long
def test_excess_use_inside_ends_only_that_task(guest: OneGuest) -> None:
    """The limit of the task holds, whatever cgroups exist below it."""
    plain, before = invocation(guest, "plain"), invocation(guest, "web")
    inside(guest, "sh -c 'head -c 1G /dev/zero | tail'")
    guest.until("it started again", lambda: invocation(guest, "web") not in ("", before))
    guest.until("the reason is reported", lambda: "oom-kill" in guest.find("twine-agent show web"))
    up(guest)
    assert invocation(guest, "plain") == plain
    assert "kept" not in inside(guest, "ls /"), "its root is as in the image again"
    assert "root" in inside(guest, "ls /srv/data")


@pytest.mark.behaviour("AG4")
@pytest.mark.long
def test_it_restarts_on_reboot_and_shuts_down_in_order(
    guest: OneGuest,
) -> None:
    """The services inside are shut down; mounts, users, cgroups and folders are removed."""
    before = invocation(guest, "web")
    inside(guest, "systemctl --no-block reboot")
    guest.until("it started again", lambda: invocation(guest, "web") not in ("", before))
    up(guest)
    end_count = guest.ssh("twine-agent logs web").count("hello: received SIGTERM")
    assert end_count >= 1
    log = "journalctl --namespace=twine-local -o cat --no-pager | grep -c 'hello: received SIGTERM'"
    end_count = int(guest.ssh(log))
    guest.ssh("twine-agent stop web", timeout_s=1800)
    assert int(guest.ssh(log)) == end_count + 1
    assert guest.ssh(f"({LEFT}) 2>/dev/null || true").split() == ["0"]
    assert "all is accounted for" in guest.ssh("twine-agent fsck")


@pytest.mark.behaviour("AG4", "AG8")
@pytest.mark.long
def test_nothing_is_left_of_a_task_deleted_during_an_out_of_memory_kill(
    guest: OneGuest,
) -> None:
    """No mount, cgroup or unit is left, and another task of the same name starts at once."""
    guest.ssh(f"{RUN} --image {SYSTEMD_TAR}", timeout_s=1800)
    up(guest)
    guest.ssh("sh /root/deleted", timeout_s=1800)
    guest.until("it is gone", lambda: "web" not in (guest.find("twine-agent ps") or "web"))
    assert guest.ssh(f"({LEFT}) 2>/dev/null || true").split() == ["0"]
    units = "systemctl list-units --all --plain --no-legend 'twine-*-web*'"
    guest.until("its units are gone", lambda: guest.ssh(units).strip() == "")
    assert "all is accounted for" in guest.ssh("twine-agent fsck")
    guest.ssh(f"{RUN} --image {SYSTEMD_TAR}", timeout_s=1800)
    up(guest)
    guest.ssh("twine-agent stop web", timeout_s=1800)


@pytest.mark.behaviour("AG4")
@pytest.mark.long
def test_own_init_that_cannot_work_is_refused_with_the_reason(guest: OneGuest) -> None:
    """Reasons: no init in the image, no systemd-nspawn on the host, an operator who forbids it."""
    facts = "twine-agent facts | grep ^capabilities"
    run = f"{RUN} --image /root/plain.tar 2>&1 || true"
    assert "has no init" in guest.ssh(run, timeout_s=900)
    assert "own-init" in guest.ssh(facts)
    guest.ssh("mv /usr/bin/systemd-nspawn /root/")
    try:
        assert "own-init" not in guest.ssh(facts)
        assert "own-init needs systemd-nspawn" in guest.ssh(run)
    finally:
        guest.ssh("mv /root/systemd-nspawn /usr/bin/")
    off = "/etc/twine/agent.toml.d/own-init.toml"
    guest.put(off, "own_init = false\n")
    try:
        guest.ssh("systemctl restart twine-agent.service")
        guest.until("it is known", lambda: "own-init" not in (guest.find(facts) or "own-init"))
        assert "own-init is off on this host" in guest.ssh(run)
    finally:
        guest.ssh(f"rm {off}; systemctl restart twine-agent.service")
    guest.until("it is known", lambda: "own-init" in guest.find(facts))
    assert "only root may request that" in guest.ssh(
        f"usermod -aG twine daemon; chmod 755 /root; setpriv --reuid daemon --regid daemon"
        f" --init-groups {run}"
    )
