"""What a task receives, and how it ends, on a real systemd (AG10, docs/agent.md)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import pytest

from tests.lab.images import busybox_image
from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.behaviour("AG10")

SECRETS = ("correct horse 1", "correct horse 2")
SCRIPT = """b=/bin/busybox
echo "given: $($b sha256sum < $CREDENTIALS_DIRECTORY/db)"
(: > $CREDENTIALS_DIRECTORY/own) || echo closed: yes
exec $b sleep 100000"""
KEEP = """
offline_restart = true
[volumes.data]
kind = "persistent"
path = "/data"
max_bytes = "16MiB"
[life.pre_stop]
command = ["/bin/sh", "-c", "echo hook >> /data/log"]
timeout_s = 300
"""
KEPT = """b=/bin/busybox; echo start >> /data/log; trap 'echo stop >> /data/log; exit 0' TERM
while :; do $b sleep 1; done"""
OWN = """b=/bin/busybox; $b ls /dev/shm | $b sed 's/^/found: /'; echo kept > /dev/shm/mark
: > /tmp/new; echo "new: $($b stat -c %a /tmp/new) $(ulimit -n) $(ulimit -Hn)"
echo "room: $($b grep -c ' /dev/shm .*size=32768k,nr_inodes=8192' /proc/self/mountinfo)"
echo "over"; exec $b sleep 100000"""
NOTICE_JOB = """
[life.notice]
port = 8099
path = "/notice"
[network.ports]
http = 8099
"""
NOTICE_READER = """b=/bin/busybox; (: > $TWINE_NOTICE) || echo closed: yes
while :; do
  printf 'HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n' |
    $b nc -l -p 8099 -w 2
  echo
done"""
NOTICE_SENDER = """import asyncio, sys
from agent.api.notices import HostNotice, HostNotices
from agent.client import AgentClient

async def main():
    notice = HostNotice(id="lent", kind="revoked", start=1.0, deadline=float(sys.argv[1]))
    async with AgentClient("unix:/run/twine/agent.sock") as client:
        await client.put_notices(HostNotices(notices=[notice]))

asyncio.run(main())
"""
SHOWN = """systemctl show UNIT; systemctl cat UNIT; cat /run/systemd/transient/UNIT
tr '\\0' '\\n' < /proc/$(systemctl show -p MainPID --value UNIT)/environ
twine-agent show --unit db; twine-agent show db; twine-agent credential ls
journalctl --no-pager -a; journalctl --namespace='*' --no-pager -a
grep -ral 'correct horse' /var/lib/twine /etc /run/twine /run/systemd /tmp || true
"""


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="task-life")
    found.up()
    found.put("/root/image.tar", busybox_image())
    found.put("/root/script", SCRIPT)
    found.ssh("systemctl start twine-agent.service", timeout_s=900)
    yield found
    found.down()


def prints(guest: OneGuest, secret: str) -> bool:
    """Return whether the task's log confirms that it received this."""
    return hashlib.sha256(secret.encode()).hexdigest() in guest.ssh("twine-agent logs db")


@pytest.mark.behaviour("AG10")
@pytest.mark.long
def test_only_its_task_can_read_a_credential(guest: OneGuest) -> None:
    """systemd keeps it in memory. It survives a killed agent; a restart brings the next one."""
    unit = "twine-task-db.service"
    put = "twine-agent credential put password"
    run = "twine-agent run db --image /root/image.tar --credential db=password"
    guest.lab("ssh", "m1", "--", put, stdin=SECRETS[0].encode())
    guest.ssh(f'{run} -- /bin/sh -c "$(cat /root/script)"', timeout_s=900)
    guest.until("it prints the secret that it was given", lambda: prints(guest, SECRETS[0]))
    guest.until("it cannot change it", lambda: "closed: yes" in guest.ssh("twine-agent logs db"))
    shown = guest.ssh(SHOWN.replace("UNIT", unit), timeout_s=900)
    assert "CREDENTIALS_DIRECTORY=" in shown
    assert "horse" not in shown

    guest.lab("ssh", "m1", "--", put, stdin=SECRETS[1].encode())
    before = guest.ssh("systemctl show -p MainPID --value twine-agent").strip()
    guest.ssh("systemctl kill -s KILL twine-agent.service")
    guest.until(
        "another agent answers",
        lambda: (
            guest.find("systemctl show -p MainPID --value twine-agent") not in ("", "0", before)
            and "password" in guest.find("twine-agent credential ls")
        ),
    )
    cat = "twine-agent exec db -- /bin/sh -c '/bin/busybox cat $CREDENTIALS_DIRECTORY/db'"
    guest.ssh("twine-agent restart db", timeout_s=900)
    guest.until("it was given the new one", lambda: prints(guest, SECRETS[1]))
    assert guest.ssh(cat) == SECRETS[1]
    read_secret = (
        'python3 -c "import socket; s = socket.socket(socket.AF_UNIX);'
        " s.bind(b'\\0ab12/unit/UNIT/db'); s.connect('/run/twine/credentials.sock');"
        ' print(len(s.recv(99)))"'
    )
    assert guest.ssh(read_secret.replace("UNIT", unit)).strip() == str(len(SECRETS[1]))
    assert guest.ssh(read_secret.replace("UNIT", "cron.service")).strip() == "0"
    other = "setpriv --reuid 65534 --clear-groups " + read_secret.replace("UNIT", unit)
    assert "Permission denied" in guest.ssh(f"{other} 2>&1 || true")

    guest.ssh("twine-agent credential rm password; twine-agent restart db || true", timeout_s=900)
    guest.until(
        "it waits for its credential",
        lambda: "holds no credential password" in guest.ssh("twine-agent ps"),
    )
    guest.ssh("twine-agent stop db", timeout_s=900)


@pytest.mark.behaviour("AG8")
@pytest.mark.long
def test_a_log_follower_gets_new_lines(guest: OneGuest) -> None:
    """The sandbox of the agent's unit reads the journal, with little of /proc visible."""
    run = "twine-agent run talks --image /root/image.tar --memory 16MiB -- /bin/sh -c"
    talk = "while :; do echo tick; /bin/busybox sleep 1; done"
    guest.ssh(f"{run} '{talk}'", timeout_s=900)
    log_lines = guest.ssh(
        "timeout 300 twine-agent logs -f --tail 1 talks | head -n 4", timeout_s=900
    )
    guest.ssh("twine-agent stop talks", timeout_s=900)
    assert log_lines.split() == ["tick"] * 4


@pytest.mark.behaviour("AG4")
@pytest.mark.long
def test_a_slow_start_is_reported_as_a_start(guest: OneGuest) -> None:
    """The steps before the command took the time; the message does not speak of a run that never
    began.

    A start in progress when the drop-in is removed gets the default timeout. It then sleeps to its
    end, which is far below that.
    """
    folder = "/run/systemd/system/twine-task-slow.service.d"
    slow = "[Service]\nExecStartPre=/bin/busybox sleep 60\nTimeoutStartSec=3\n"
    guest.put(f"{folder}/slow.conf", slow)
    run = "twine-agent run slow --image /root/image.tar --no-wait -- /bin/busybox sleep 100000"
    guest.ssh(f"systemctl daemon-reload; {run}", timeout_s=900)
    guest.until(
        "its start was given up",
        lambda: "did not start it" in guest.ssh("twine-agent show slow"),
    )
    guest.ssh(f"rm -r {folder}; systemctl daemon-reload")
    guest.until("it runs", lambda: "running" in guest.ssh("twine-agent show slow"))
    took = guest.ssh("systemctl show -p TimeoutStartUSec --value twine-task-slow.service")
    assert took.strip() == "10min"
    guest.ssh("twine-agent stop slow", timeout_s=900)


@pytest.mark.behaviour("AG4", "AG10")
@pytest.mark.long
def test_tasks_end_in_order_before_a_reboot_and_come_back(guest: OneGuest) -> None:
    """The hook runs and the signal is handled before the host shuts down; no task is lost."""
    guest.put("/root/keep.toml", KEEP)
    guest.put("/root/kept", KEPT)
    run = 'twine-agent run {} --image /root/image.tar {} -- /bin/sh -c "$(cat /root/kept)"'
    guest.ssh(run.format("keep", "--file /root/keep.toml"), timeout_s=900)
    guest.ssh("twine-agent run waits --image /root/image.tar -- /bin/busybox sleep 100000")
    guest.until(
        "logind is to wait", lambda: "tasks end in order" in guest.ssh("systemd-inhibit --list")
    )
    before = guest.boot_id()
    guest.ssh("systemctl enable twine-agent.service; systemctl --no-block reboot")
    guest.booted_again(before)
    guest.until("it runs again", lambda: "running" in guest.find("twine-agent show keep"))
    log = "twine-agent exec keep -- /bin/busybox cat /data/log"
    guest.until("it has begun", lambda: len(guest.find(log).split()) == 4)
    assert guest.ssh(log).split() == ["start", "hook", "stop", "start"]
    task_text = guest.ssh("twine-agent show keep")
    assert re.search(r"restarts +0", task_text), task_text
    assert "waiting for the owner" in guest.ssh("twine-agent show waits")
    guest.ssh("twine-agent stop keep; twine-agent stop waits", timeout_s=900)


@pytest.mark.behaviour("BUG-AG30", "BUG-AG35")
@pytest.mark.long
def test_shared_memory_and_process_limits_are_per_task(guest: OneGuest) -> None:
    """Tasks shared the host's /dev/shm. BUG-AG35: umask was 0077, and the limit of files 1024."""
    guest.put("/root/own", OWN)
    guest.ssh("touch /dev/shm/of-host")
    for name in ("one", "two"):
        guest.put(f"/root/{name}.toml", f'entitlement = "{name}"\n[ulimits]\nnofile = 4096\n')
        guest.ssh(
            f"twine-agent run {name} --image /root/image.tar --memory 64MiB"
            f' --file /root/{name}.toml -- /bin/sh -c "$(cat /root/own)"',
            timeout_s=900,
        )
        logs = f"twine-agent logs {name}"
        guest.until("it says all", lambda logs=logs: "over" in guest.find(logs))  # type: ignore[misc]
        assert guest.ssh(logs).splitlines()[-3:] == ["new: 644 4096 4096", "room: 1", "over"]
        assert "found: " not in guest.ssh(logs)
    assert guest.ssh("ls /dev/shm").split() == ["of-host"]
    for name in ("one", "two"):
        guest.ssh(f"twine-agent stop {name}", timeout_s=900)


@pytest.mark.behaviour("BUG-AG40")
@pytest.mark.long
def test_a_journald_that_is_killed_costs_no_task_its_output(guest: OneGuest) -> None:
    """The task was not started again, and one that checks its writes ended."""
    talk = "n=0; while :; do n=$((n+1)); echo tick $n || exit 9; /bin/busybox sleep 1; done"
    run = "twine-agent run speaks --image /root/image.tar --memory 16MiB -- /bin/sh -c"
    guest.ssh(f"{run} '{talk}'", timeout_s=900)
    unit, logs = "systemd-journald@twine-local.service", "twine-agent logs --tail 1 speaks"
    guest.until("it speaks", lambda: "tick" in guest.find(logs))
    guest.ssh(f"systemctl kill -s KILL {unit}")
    restarts = f"systemctl show -p NRestarts --value {unit}"
    guest.until("another journald is there", lambda: guest.find(restarts) not in ("", "0"))
    before = guest.ssh(logs)
    guest.until("its output continues", lambda: guest.find(logs) not in ("", before.strip()))
    assert re.search(r"restarts +0", guest.ssh("twine-agent show speaks"))
    guest.ssh("twine-agent stop speaks", timeout_s=900)


@pytest.mark.behaviour("EL9")
@pytest.mark.long
def test_a_task_is_notified_ahead_by_a_file_and_its_hook(guest: OneGuest) -> None:
    """The task can read but not write the file. Its hook is called, and a killed agent repeats the
    call.
    """
    guest.put("/root/reader.toml", NOTICE_JOB)
    guest.put("/root/reader", NOTICE_READER)
    run = "twine-agent run reader --image /root/image.tar --file /root/reader.toml"
    guest.ssh(f'{run} -- /bin/sh -c "$(cat /root/reader)"', timeout_s=900)
    guest.until("it is closed", lambda: "closed: yes" in guest.ssh("twine-agent logs reader"))
    guest.put("/root/sender.py", NOTICE_SENDER)
    guest.ssh("/opt/twine/bin/python /root/sender.py 2000000000", timeout_s=900)
    read = "twine-agent exec reader -- /bin/busybox cat /run/twine-notice/notice.json"
    guest.until("the file says so", lambda: '"deadline":2000000000' in guest.find(read))
    show_log = "twine-agent logs reader"
    guest.until("its hook was called", lambda: '"deadline":2000000000' in guest.ssh(show_log))
    started = guest.ssh("systemctl show -p InvocationID --value twine-task-reader")
    guest.ssh("systemctl kill -s KILL twine-agent.service")
    guest.until("another agent answers", lambda: "reader" in guest.find("twine-agent ps"))
    assert '"deadline":2000000000' in guest.ssh(read)
    guest.ssh("/opt/twine/bin/python /root/sender.py 2000000001", timeout_s=900)
    guest.until("its hook was called", lambda: '"deadline":2000000001' in guest.ssh(show_log))
    assert guest.ssh(show_log).count("POST /notice") == 2
    assert guest.ssh("systemctl show -p InvocationID --value twine-task-reader") == started
    guest.ssh("twine-agent stop reader", timeout_s=900)
    assert guest.ssh("ls -A /run/twine/notices").split() == [".host.json"]
