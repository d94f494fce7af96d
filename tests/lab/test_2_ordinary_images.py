"""What ordinary images find in their root, as root or as another user: names and writable files."""

from __future__ import annotations

import base64
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from oci import Layout, entry, folder, layer

from tests.lab.images import BUSYBOX_FILES, SHELL
from tests.lab.one_guest import OneGuest

pytestmark = [pytest.mark.long, pytest.mark.behaviour("BUG-AG31")]
IMAGE = layer(
    *BUSYBOX_FILES,
    SHELL,
    entry("etc/passwd", data=b"root:x:0:0:root:/root:/bin/sh\nwww:x:33:33::/:/bin/sh\n"),
    entry("etc/group", data=b"root:x:0:\nwww:x:33:\n"),
    entry("etc/secret", data=b"root's\n", mode=0o400),
    entry("etc/resolv.conf", tarfile.SYMTYPE, linkname="/run/systemd/resolve/stub-resolv.conf"),
    entry("var/run", tarfile.SYMTYPE, linkname="/run"),
    folder("var/cache"),
    folder("var/cache/www", mode=0o700, uid=33, gid=33),
    folder("run/www", uid=33, gid=33),
    folder("usr"),
    folder("usr/share"),
    folder("data"),
    folder("home"),
    folder("home/www", mode=0o700, uid=33, gid=33),
)
SCRIPT = """b=/bin/busybox
echo "who: $($b whoami) $HOME $($b cat /etc/secret)"
for at in etc var/cache/www run run/www usr/share root home/www data tmp; do
$b touch /$at/new && echo "wrote: $at"; done 2>&1
echo "pid: $(echo 7 > /var/run/www.pid && $b cat /run/www.pid)"
$b chown root:root /etc/new && $b mkdir -p /var/lib/app/x && echo "chown: fine"
echo "again: $($b ls /data)"
echo "top: $($b mkdir /fresh 2>&1)"
echo "device: $($b mknod /data/null c 1 3 2>&1)"
echo "full: $($b dd if=/dev/zero of=/data/big bs=65536 count=1600 2>&1 | $b head -1)"
echo "names: $($b head -1 /etc/hosts | $b tr '\\t' ' ') $($b cat /etc/hostname)"
echo "by name" > /dev/stdout; echo "errors" >> /dev/stderr; echo "<3>level"; $b sleep 2
echo over; exec $b sleep 100000"""
TASK = """root_max_bytes = "64MiB"
[network.dns]
servers = ["10.77.0.53"]
[network.dns.hosts]
"db.example" = "10.1.2.3"
"""
WROTE = ["etc", "var/cache/www", "run", "run/www", "usr/share", "home/www", "data", "tmp"]


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneGuest]:
    found = OneGuest(name="ordinary")
    found.up()
    put(found, tmp_path_factory.mktemp("image"))
    found.put("/root/task.toml", TASK)
    found.put("/root/script", SCRIPT)
    found.ssh("systemctl start twine-agent.service", timeout_s=900)
    yield found
    found.down()


def put(guest: OneGuest, top: Path) -> None:
    layout = Layout(top)
    layout.image(IMAGE, config={"Cmd": ["/bin/sh", "-c", SCRIPT]})
    guest.put("/root/ordinary.tar", layout.archive())


def log_lines(guest: OneGuest, name: str, times: int = 1) -> list[str]:
    """Return the log lines of a task's last run, after this number of runs."""
    logs = f"twine-agent logs {name}"
    guest.until("it says all", lambda: guest.find(logs).splitlines().count("over") == times)
    lines = guest.ssh(logs).splitlines()
    begin = max(n for n, line in enumerate(lines) if line.startswith("who: "))
    return lines[begin:]


@pytest.mark.behaviour("BUG-AG31", "BUG-AG39", "BUG-AG34", "BUG-AG32")
def test_an_image_with_user_root_can_write_to_its_usual_folders(guest: OneGuest) -> None:
    """All files of an image that runs as root belong to the task, within a bound."""
    run = "twine-agent run web --image oci-archive:/root/ordinary.tar --memory 64MiB"
    guest.ssh(f"{run} --file /root/task.toml", timeout_s=900)
    lines = log_lines(guest, "web")
    found = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert found["who"] == "root /root root's"
    assert [line.split()[1] for line in lines if line.startswith("wrote: ")] == WROTE
    assert any("/root/new: Read-only file system" in line for line in lines)
    assert found["pid"] == "7"
    assert found["chown"] == "fine"
    assert "Read-only file system" in found["top"]
    assert "not permitted" in found["device"]
    assert "exceeded" in found["full"]
    assert {"by name", "errors", "<3>level"} <= {*lines}  # BUG-AG39, BUG-AG34
    assert found["names"] == "127.0.0.1 localhost m1"
    inside = "twine-agent exec web -- /bin/busybox cat /etc/resolv.conf /etc/hosts"
    assert "nameserver 10.77.0.53" in guest.ssh(inside)
    assert "10.1.2.3\tdb.example" in guest.ssh(inside)
    inside = "twine-agent exec web -- /bin/busybox cat /run/www.pid"
    assert guest.ssh(inside) == "7\n", "a command inside has the task's own /run"
    eats = "x=12345678; while :; do x=$x$x; done"
    output = guest.ssh(f"twine-agent exec web -- /bin/sh -c '{eats}' 2>&1; echo code $?")
    assert "it exceeded 32MiB of memory" in output  # BUG-AG32: this write ended the task
    assert output.endswith("code 137\n")
    task = json.loads(guest.ssh("twine-agent show web -o json"))["task"]
    assert (task["state"], task["restarts"]) == ("running", 0)

    guest.ssh("twine-agent restart web", timeout_s=900)
    lines = log_lines(guest, "web", 2)
    assert "again: new" in lines, "what the run before wrote is gone"
    exposure = guest.ssh("systemd-analyze security twine-task-web.service | tail -1")
    assert float(exposure.split()[-3]) <= 1.5, exposure
    guest.ssh("twine-agent stop web", timeout_s=900)
    assert guest.ssh("grep -c twine/tasks/web /proc/self/mountinfo || true").strip() == "0"
    guest.ssh("twine-agent fsck")


def test_the_host_does_not_follow_a_link_that_a_task_made(guest: OneGuest) -> None:
    """A task moves the folder above its volume and puts a link to the host's there. At its end no
    mount of the host is unmounted, and the root can be removed.
    """
    guest.ssh("mkdir -p /mnt/vol && mount -t tmpfs mine /mnt/vol")
    evil = "cd /data && /bin/busybox mv in out && /bin/busybox ln -s /mnt in; echo moved"
    guest.put(
        "/root/vol.toml",
        'root = "writable"\n[volumes.data]\nkind = "scratch"\npath = "/data/in/vol"\n',
    )
    run = "twine-agent run evil --no-wait --image oci-archive:/root/ordinary.tar"
    guest.ssh(f'{run} --file /root/vol.toml -- /bin/sh -c "{evil}"', timeout_s=900)
    logs = "twine-agent logs evil"
    guest.until("it ended and ran again", lambda: guest.find(logs).count("moved") > 1)
    assert "mine" in guest.ssh("grep ' /mnt/vol ' /proc/mounts")
    guest.ssh("twine-agent stop evil", timeout_s=900)
    assert guest.ssh("grep -c twine/tasks/evil /proc/self/mountinfo || true").strip() == "0"
    guest.ssh("umount /mnt/vol")


EXACT = "\n\nblanks  \r\n<3>level\n\t\nend"
TALKS = """/bin/busybox printf "%s" "$EXACT"; echo
i=0; while :; do i=$((i+1)); echo $i || exit 9; /bin/busybox usleep 50000; done"""


@pytest.mark.behaviour("BUG-AG34", "BUG-AG40")
def test_a_log_is_complete_across_restarts(guest: OneGuest) -> None:
    """The log is complete byte for byte. BUG-AG40: no task ends because of logging, and no line is
    lost.
    """
    guest.put("/root/exact", EXACT)
    guest.put("/root/talks", TALKS)
    run = "twine-agent run talks --image oci-archive:/root/ordinary.tar --memory 64MiB"
    guest.ssh(
        f'{run} --env EXACT="$(cat /root/exact)" -- /bin/sh -c "$(cat /root/talks)"', timeout_s=900
    )
    logs = "twine-agent logs talks | grep -ac '^[0-9]'; true"
    ends = (
        "systemctl kill -s KILL twine-output.service",
        "systemctl kill -s KILL systemd-journald@twine-local.service",
        "systemctl restart twine-output.service",
        "systemctl kill -s KILL twine-agent.service",
    )
    for end in ends:
        before = int(guest.find(logs) or 0)
        guest.ssh(end)
        guest.until(
            "its output is read again", lambda n=before: int(guest.find(logs) or 0) > n + 20
        )
    output = guest.ssh("twine-agent logs talks | base64 -w 0", timeout_s=900)
    text = base64.b64decode(output).decode()
    assert text.startswith(EXACT + "\n1\n2\n")
    numbers = [int(n) for n in text.removeprefix(EXACT + "\n").split()]
    assert numbers == [*range(1, len(numbers) + 1)], "none is lost, none is twice"
    task = json.loads(guest.ssh("twine-agent show talks -o json"))["task"]
    assert (task["state"], task["restarts"]) == ("running", 0)
    guest.ssh("twine-agent stop talks", timeout_s=900)
    assert guest.ssh("ls /run/twine/output/local | grep -c talks; true").strip() == "0"


@pytest.mark.behaviour("BUG-AG39", "BUG-AG42")
def test_last_lines_and_dropped_lines_are_reported(guest: OneGuest) -> None:
    """Output just before the end of a program is in its log. BUG-AG42: journald's rate limit drops
    lines, and the log reports their number.
    """
    # One program writes the lines: a loop of the shell can need more than the 10 s of the limit.
    many = "/bin/busybox seq 20000"
    script = f"{many}; /bin/busybox sleep 12; echo next; echo last > /dev/stdout; exit 3"
    run = "twine-agent run loud --no-wait --image oci-archive:/root/ordinary.tar --memory 64MiB"
    guest.ssh(f"{run} -- /bin/sh -c '{script}'", timeout_s=900)
    logs = "twine-agent logs loud"
    guest.until("it spoke to its end", lambda: "last" in guest.find(logs).splitlines())
    guest.until("it is reported", lambda: "Suppressed" in guest.find(logs))
    assert "exit code 3" in guest.ssh("twine-agent show loud")
    facts = json.loads(guest.ssh("twine-agent facts -o json"))
    assert facts["log_lines_suppressed"] > 0
    guest.ssh("twine-agent stop loud", timeout_s=900)
