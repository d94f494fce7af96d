"""Images that name a user: the files of that user belong to the task (docs/images.md)."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from oci import Layout, entry, folder, layer

from tests.lab.images import BUSYBOX_FILES, SHELL
from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.long
USERS = b"root:x:0:0:root:/root:/bin/sh\nother:x:7:7::/:/bin/sh\n"
USERS += b"app:x:1000:1001:App:/home/app:/bin/sh\n"
GROUPS = b"root:x:0:\nstaff:x:1001:\nother:x:7:\n"
OF_APP = {"uid": 1000, "gid": 1001}
BASE = layer(
    *BUSYBOX_FILES,
    SHELL,
    folder("usr"),
    folder("usr/lib"),
    entry("usr/lib/users", data=USERS),
    entry("etc/passwd", tarfile.SYMTYPE, linkname="/usr/lib/users"),
    entry("etc/group", data=GROUPS),
    entry("etc/of-root", data=b"root's\n", mode=0o400),
    entry("etc/of-other", data=b"another's\n", mode=0o400, uid=7, gid=7),
    entry("etc/of-staff", data=b"the group's\n", mode=0o440, gid=1001),
    entry("etc/of-wheel", data=b"of root and its group\n", mode=0o440),
    entry("root/of-all", data=b"the image's\n", mode=0o644),
    folder("home"),
    folder("home/app", mode=0o700, **OF_APP),
    entry("home/app/own", data=b"its own\n", mode=0o400, **OF_APP),
    folder("srv", uid=7, gid=7),
)
SCRIPT = """b=/bin/busybox
echo "who: $($b whoami) $($b id -gn) $USER $HOME $($b pwd)"
echo "mine: $(($($b id -u) == $($b stat -c %u own))) $($b stat -c %U:%G own) $($b cat own)"
echo "group: $($b cat /etc/of-staff 2>&1)"
echo "wheel: $($b cat /etc/of-wheel 2>&1)"
echo "root: $($b stat -c %U /etc/of-root) $($b cat /etc/of-root 2>&1)"
echo "other: $($b cat /etc/of-other 2>&1)"
echo "write: $($b touch /home/app/x 2>&1)"
echo "owner: $($b chmod 600 own 2>&1)"
echo run >> /srv/data/runs
echo "runs: $($b wc -l < /srv/data/runs)"
exec $b sleep 100000"""
CONFIG = {"User": "app", "WorkingDir": "/home/app", "Cmd": ["/bin/sh", "-c", SCRIPT]}
VOLUME = '[volumes.data]\nkind = "persistent"\npath = "/srv/data"\n'
"""The mount point has to be created in a folder of another user."""
TASK = f'root = "read-only"\n{VOLUME}'
ROOT = "/var/lib/twine/tasks/web"
RUN = "twine-agent run web --image oci-archive:/root/app.tar --file /root/task.toml --memory 64MiB"
OWNERS = f"""umount -R {ROOT} && cd {ROOT} || exit 1
find . -path ./srv/data -prune -o -printf '%p %U:%G %m\\n' | sort"""
"""Lists all files of the root as they are on disk; runs in a private mount namespace."""
MOUNTS = "grep -c twine/tasks /proc/self/mountinfo || true"


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneGuest]:
    found = OneGuest(name="user")
    found.up()
    top = tmp_path_factory.mktemp("images")
    for name, user in (("app", "app"), ("number", "1000:0"), ("nobody", "nobody")):
        put(found, top / name, name, {**CONFIG, "User": user})
    run = "/bin/busybox cat of-all; exec /bin/busybox sleep 100000"
    plain: dict[str, object] = {"WorkingDir": "/root", "Cmd": ["/bin/sh", "-c", run]}
    put(found, top / "plain", "plain", plain)
    found.put("/root/task.toml", TASK)
    found.put("/root/writable.toml", VOLUME)
    found.ssh("systemctl start twine-agent.service", timeout_s=900)
    yield found
    found.down()


def put(guest: OneGuest, folder: Path, name: str, config: dict[str, object]) -> None:
    """Copy the archive of an image into the guest."""
    layout = Layout(folder)
    layout.image(BASE, config=config)
    guest.put(f"/root/{name}.tar", layout.archive())


def values_in_log(guest: OneGuest, runs: int) -> dict[str, str]:
    """Return the task's reported values once it has run this number of times."""
    logs = "twine-agent logs web"
    guest.until("it says all", lambda: f"runs: {runs}" in guest.find(logs).splitlines())
    lines = guest.ssh(logs).splitlines()
    end = lines.index(f"runs: {runs}")
    begin = max(n for n, line in enumerate(lines[:end]) if line.startswith("who: "))
    return dict(line.split(": ", 1) for line in lines[begin:end] if ": " in line)


def mounts(guest: OneGuest) -> int:
    return int(guest.ssh(MOUNTS))


@pytest.mark.behaviour("AG3", "AG8")
def test_a_task_owns_the_files_of_its_image_user(guest: OneGuest) -> None:
    """The task reads them and sees itself as their owner, by name; files of other users stay
    theirs.
    """
    guest.ssh(RUN, timeout_s=900)
    found = values_in_log(guest, 1)
    assert found["who"] == "app staff app /home/app /home/app"
    assert found["mine"] == "1 app:staff its own"
    assert found["group"] == "the group's"
    assert found["root"].startswith("root ")
    assert "Permission denied" in found["root"]
    assert "Permission denied" in found["wheel"]
    assert "Permission denied" in found["other"]
    assert "Read-only file system" in found["write"]
    assert "Read-only file system" in found["owner"]
    inside = (
        "twine-agent exec web -- /bin/busybox sh -c '/bin/busybox whoami; read x < own; echo $x'"
    )
    assert guest.ssh(inside).split("\n")[:2] == ["app", "its own"]
    assert "all is accounted for" in guest.ssh("twine-agent fsck")
    kept = guest.ssh("twine-agent gc --explain | grep ^mount")
    assert kept.count("task web") == len(kept.splitlines()) > 0


@pytest.mark.behaviour("AG3")
def test_no_owner_is_changed_and_nothing_is_left_mounted(guest: OneGuest) -> None:
    """The task ends by a kill, a restart, a dying agent, or a stop."""
    shown = mounts(guest)
    pid = "systemctl show -P MainPID twine-task-web.service"
    before = guest.ssh(pid)
    guest.ssh(f"kill -9 $({pid})")
    guest.until("it runs again", lambda: guest.find(pid) not in ("0", "", before.strip()))
    values_in_log(guest, 2)
    assert mounts(guest) == shown

    guest.ssh("kill -9 $(systemctl show -P MainPID twine-agent.service)")
    guest.until("the agent is back", lambda: "web" in guest.find("twine-agent ps"))
    assert mounts(guest) == shown
    guest.ssh("twine-agent restart web", timeout_s=900)
    assert values_in_log(guest, 3)["mine"] == "1 app:staff its own"
    assert mounts(guest) == shown
    assert "all is accounted for" in guest.ssh("twine-agent fsck")

    guest.put("/root/owners", OWNERS)
    owners = guest.ssh("unshare -m sh /root/owners").splitlines()
    assert {"./home/app/own 1000:1001 400", "./home/app 1000:1001 700"} <= set(owners)
    assert {"./etc/of-root 0:0 400", "./etc/of-other 7:7 400", "./srv 7:7 755"} <= set(owners)
    assert all(line.split()[1] in ("0:0", "7:7", "1000:1001", "0:1001") for line in owners)
    guest.ssh("twine-agent stop web", timeout_s=900)
    assert mounts(guest) == 0
    assert "all is accounted for" in guest.ssh("twine-agent fsck")


@pytest.mark.behaviour("F-42")
def test_leftovers_of_a_killed_clean_up_are_removed_by_the_next_start(
    guest: OneGuest,
) -> None:
    """A mount that was never released does not make the root impossible to remove."""
    guest.ssh(RUN, timeout_s=900)
    values_in_log(guest, 4)
    shown = mounts(guest)
    for _ in range(2):  # as if the clean-up after the end had been killed, twice
        guest.ssh(f"mount --bind {ROOT} {ROOT}")
    assert mounts(guest) > shown
    guest.ssh("twine-agent restart web", timeout_s=900)
    assert values_in_log(guest, 5)["mine"] == "1 app:staff its own"
    assert mounts(guest) == shown

    stop = "d=/run/systemd/system/twine-task-web.service.d; mkdir -p $d && "
    stop += "printf '[Service]\\nExecStopPost=\\n' > $d/no-clean-up.conf && systemctl daemon-reload"
    guest.ssh(stop)
    guest.ssh("twine-agent stop web", timeout_s=900)
    assert mounts(guest) == 0, "it went with the root"
    assert "all is accounted for" in guest.ssh("twine-agent fsck")
    guest.ssh("rm -r /run/systemd/system/twine-task-web.service.d; systemctl daemon-reload")


@pytest.mark.behaviour("AG3")
def test_an_image_without_a_user_works_in_the_home_of_root(guest: OneGuest) -> None:
    """The home is the image's own; with `ProtectHome=yes` systemd ended with 200."""
    guest.ssh("twine-agent run plain --image oci-archive:/root/plain.tar --memory 64MiB")
    guest.until("it says it", lambda: "the image's" in guest.find("twine-agent logs plain"))
    guest.ssh("twine-agent stop plain")


@pytest.mark.behaviour("AG3")
def test_a_user_id_in_group_root_has_the_files_of_that_group(guest: OneGuest) -> None:
    """Many images give group root access, so that any user can start them."""
    guest.ssh(
        "twine-agent run web --image oci-archive:/root/number.tar --file /root/task.toml"
        " --memory 64MiB",
        timeout_s=900,
    )
    found = values_in_log(guest, 6)
    assert found["who"].startswith("app root")
    assert found["mine"].startswith("1 app:")
    assert found["wheel"] == "of root and its group"
    assert "Permission denied" in found["group"]
    assert "Permission denied" in found["root"]
    guest.ssh("twine-agent stop web", timeout_s=900)
    assert mounts(guest) == 0


def test_by_default_the_user_may_write_to_the_root(guest: OneGuest) -> None:
    """The root of an OCI image is writable unless the task overrides it (ADR 0176)."""
    guest.ssh(RUN.replace("task.toml", "writable.toml"), timeout_s=900)
    found = values_in_log(guest, 7)
    assert (found["write"], found["owner"]) == ("", "")
    assert found["mine"] == "1 app:staff its own"
    assert "Permission denied" in found["root"]
    assert "Permission denied" in found["other"]
    guest.ssh("twine-agent stop web", timeout_s=900)
    assert mounts(guest) == 0
    assert "all is accounted for" in guest.ssh("twine-agent fsck")


def test_a_user_missing_in_the_image_is_reported(guest: OneGuest) -> None:
    run = "twine-agent run web --image oci-archive:/root/nobody.tar --memory 64MiB 2>&1; true"
    output = guest.ssh(run, timeout_s=900)
    assert "user 'nobody', and its /etc/passwd has no such user" in output
    assert "USER 1000" in output
    assert "Traceback" not in output
    assert "all is accounted for" in guest.ssh("twine-agent fsck")
