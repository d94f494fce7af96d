"""The agent whose disk is slow, fails, or loses power between any two writes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from conftest import TheAgent
from disk import FOLDER, STATE, BadDisk, shell
from write_log import entries

from agent.runtime.core.records import TaskRecord, Wanted
from agent.runtime.journal import Journal

IMAGE = "--image /root/image.tar --memory 16MiB"
SLEEPS = "/bin/busybox sleep 1000000"
END = "dm-log-writes-end"
"""The last mark, which device-mapper writes itself."""
WATCHDOG_S = 30.0
"""Watchdog timeout of the agent's unit: a disk that hangs for longer must not end the agent."""


def begun(command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


@pytest.mark.behaviour("F-41")
def test_health_is_answered_while_the_disk_hangs(agent: TheAgent, disk: BadDisk) -> None:
    """Requests that need no write are answered. An order is acknowledged once it is on the disk."""
    pid, before = agent.pid(), agent.tasks()["old"]
    disk.block_all()
    try:
        client = begun(f"twine-agent run new {IMAGE} -- {SLEEPS}")
        began, answers = time.monotonic(), 0
        while answers < 20 or time.monotonic() - began < 2 * WATCHDOG_S:
            agent.health()
            assert agent.tasks()["old"] == before
            answers += 1
        assert client.poll() != 0, "it was acknowledged before its record was written"
    finally:
        disk.unblock()
    client.wait(900)
    agent.run("new")
    assert agent.pid() == pid
    assert agent.tasks()["new"]["state"] == "running"


@pytest.mark.behaviour("F-41")
def test_a_disk_that_takes_half_a_second_for_each_write_delays_starts_alone(
    agent: TheAgent, disk: BadDisk
) -> None:
    pid = agent.pid()
    disk.behaves(f"delay {disk.loops[0]} 0 0 {disk.loops[0]} 0 500")
    agent.run("new")
    assert agent.tasks()["new"]["state"] == "running"
    assert agent.pid() == pid


@pytest.mark.behaviour("F-35")
def test_failed_reads_are_reported_and_end_with_the_fault(agent: TheAgent, disk: BadDisk) -> None:
    """A start from an unreadable image fails with a text; everything else continues."""
    pid, before = agent.pid(), agent.tasks()["old"]["invocation_id"]
    image = agent.tasks()["old"]["image"]
    disk.behaves(f"flakey {disk.loops[0]} 0 0 3600 1 error_reads")
    shell("sync; echo 3 > /proc/sys/vm/drop_caches")
    words = f"--image {image} --memory 16MiB --no-wait -- {SLEEPS}"
    failed = subprocess.run(
        ["sh", "-c", f"twine-agent run new {words}"], capture_output=True, text=True, check=False
    )
    if failed.returncode == 0:
        agent.until(
            "its start has failed with a reason",
            lambda: agent.tasks()["new"].get("reason", "") != "",
        )
        print(agent.tasks()["new"]["reason"])
    else:
        assert "rror" in failed.stderr, failed.stderr
        print(failed.stderr)
    agent.health()
    assert agent.tasks()["old"]["invocation_id"] == before
    disk.works()
    if failed.returncode:
        shell(f"twine-agent run new {words}")
    agent.until("it runs", lambda: agent.tasks()["new"]["state"] == "running")
    assert (agent.pid(), agent.tasks()["old"]["invocation_id"]) == (pid, before)


@pytest.mark.behaviour("F-37", "F-35")
def test_a_read_only_file_system_is_reported_and_tasks_keep_running(
    agent: TheAgent, disk: BadDisk
) -> None:
    """The file system becomes read-only after failed writes. The agent promises nothing on it and
    does not retry in a loop.
    """
    pid, before = agent.pid(), agent.tasks()["old"]
    disk.behaves(f"flakey {disk.loops[0]} 0 0 3600 1 error_writes")
    subprocess.run(["sh", "-c", f"touch {STATE}/x; sync -f {STATE}"], check=False)
    options = "findmnt -n -o OPTIONS --mountpoint /var/lib/twine"
    agent.until("it is read-only", lambda: shell(options).splitlines()[-1].startswith("ro"))
    run = f"twine-agent run new {IMAGE} -- {SLEEPS}"
    refused = subprocess.run(["sh", "-c", run], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "read-only" in refused.stderr, refused.stderr
    agent.until("it says so", lambda: any("read-only" in p for p in agent.problems()))
    agent.health()
    assert agent.tasks() == {"old": before}
    assert agent.pid() == pid
    shell("systemctl restart twine-agent.service")
    assert agent.tasks()["old"]["invocation_id"] == before["invocation_id"]

    shell(f"systemctl stop twine-agent.service; umount -l {STATE}")
    disk.works()
    shell("systemctl stop 'twine-task-*.service'")
    agent.until(
        "no process uses it", lambda: shell("dmsetup info -c --noheadings -o open bad") == "0"
    )
    disk.mount()
    agent.start()
    agent.until("it runs again", lambda: agent.tasks()["old"]["state"] == "running")
    agent.run("new")


class Promised:
    """Acknowledged orders at a moment: the required or permitted state of each task."""

    def __init__(self) -> None:
        self.known: dict[str, set[Wanted | None]] = {}

    def record(self, word: str) -> None:
        """Record a mark: `ask-run-NAME`, `done-run-NAME`, `ask-stop-NAME`, `done-stop-NAME`."""
        when, what, name = word.split("-")
        after = Wanted.RUN if what == "run" else None
        if when == "ask":
            self.known.setdefault(name, {None}).add(after)
            if what == "stop":
                self.known[name].add(Wanted.GONE)
        else:
            self.known[name] = {after} if what == "run" else {None, Wanted.GONE}

    def broken(self, found: dict[str, TaskRecord]) -> list[str]:
        return [
            f"{name} is {held.wanted if (held := found.get(name)) else None}, not one of {may}"
            for name, may in self.known.items()
            if (held.wanted if (held := found.get(name)) else None) not in may
        ]


def recovered(disk: Path) -> tuple[dict[str, TaskRecord], dict[str, str]]:
    """Return the records on a disk after a power cut, and the records that cannot be read."""
    copy, folder = FOLDER / "copy", FOLDER / "mnt"
    folder.mkdir(exist_ok=True)
    shell(f"cp --reflink=always {disk} {copy} && mount -o loop {copy} {folder}")
    try:
        if not (folder / "journal").exists():
            return {}, {}
        replay = Journal(folder / "journal").replay()
        return replay.tasks, replay.unreadable
    finally:
        shell(f"umount {folder} && rm {copy}")


@pytest.mark.behaviour("F-36")
def test_acknowledged_writes_survive_a_power_cut_at_any_time() -> None:
    """A power cut is tried at each flush of the disk; no record is ever torn."""
    orders = [("run", "a"), ("run", "b"), ("stop", "a"), ("run", "c"), ("stop", "b"), ("run", "a")]
    with BadDisk(logged=True) as disk:
        agent = TheAgent()
        agent.start()
        for what, name in orders:
            disk.mark(f"ask-{what}-{name}")
            if what == "run":
                agent.run(name)
            else:
                shell(f"twine-agent stop {name}")
            disk.mark(f"done-{what}-{name}")
        disk.disconnect()
        promised, flushes, wrong, marks = Promised(), 0, list[str](), 0
        replayed = FOLDER / "replayed"
        replayed.touch()
        shell(f"truncate -s {disk.sectors * 512} {replayed}")
        is_formatted = False
        with replayed.open("r+b", buffering=0) as file:
            for entry in entries(Path(disk.loops[1])):
                if entry.word == END:
                    break  # the reader writes what follows
                if entry.word:
                    promised.record(entry.word)
                    marks += 1
                    is_formatted = True
                    continue
                file.seek(entry.at)
                file.write(entry.data)
                if not (entry.is_flush and is_formatted):
                    continue
                flushes += 1
                found, torn = recovered(replayed)
                wrong += [f"flush {flushes}: {name}: {why}" for name, why in torn.items()]
                wrong += [f"flush {flushes}: {why}" for why in promised.broken(found)]
    print(f"{flushes} flushes, {marks} marks")
    assert wrong == []
    assert marks == 2 * len(orders)
    assert flushes > 4 * len(orders)


@pytest.mark.behaviour("F-04")
def test_a_hanging_agent_is_replaced_and_tasks_continue(agent: TheAgent) -> None:
    """The service manager's watchdog ends the hanging agent and starts another one."""
    pid, before = agent.pid(), agent.tasks()["old"]["invocation_id"]
    shell(f"kill -STOP {pid}")
    agent.until("there is another agent", lambda: agent.pid() not in (0, pid))
    agent.until("it answers", lambda: subprocess.run(["twine-agent", "ps"]).returncode == 0)
    assert agent.tasks()["old"]["invocation_id"] == before
    why = shell("journalctl -u twine-agent.service --no-pager -o cat | grep -i watchdog | tail -1")
    assert why
