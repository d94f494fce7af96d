"""The agent's Debian package on a host with tasks: upgrade, downgrade and removal."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.images import busybox_image
from tests.lab.lab_client import ROOT
from tests.lab.one_guest import OneGuest
from vm_lab.package import build_package

TASKS = 50
RUN = """digest=$(twine-agent run t1 --image /root/image.tar --memory 8MiB --no-wait \
 -- /bin/busybox sleep 1000000 >/dev/null && twine-agent images -o json \
 | python3 -c 'import json, sys; print(json.load(sys.stdin)["images"][0]["digest"])')
for n in $(seq 2 TASKS); do
 twine-agent run t$n --image $digest --memory 8MiB --no-wait -- /bin/busybox sleep 1000000
done"""
RUN_ONE = "twine-agent run --image /root/image.tar --memory 8MiB"
SEEN = """for n in $(seq 1 TASKS); do
 systemctl show -p Id,InvocationID,MainPID,ExecMainStartTimestampMonotonic,NRestarts twine-task-t$n
done"""
RUNS = """twine-agent ps -o json | python3 -c 'import json, sys
print(sum(t["state"] == "running" for t in json.load(sys.stdin)["tasks"]))'"""
LEFT = """find / -xdev -ipath '*twine*' -not -path '/proc/*' -not -path '/root/*' \
 -not -path '/sys/*' -not -path '/run/systemd/journal*' -not -path '/run/systemd/transient' \
 -not -path '/var/lib/twine'
systemctl list-units --all --plain --no-legend 'twine*' 'workload*'
systemctl list-unit-files --no-legend 'twine*'
getent group twine; nft list tables; ip -o link | grep -E 'tw[0-9a-z]{6}|twine'
btrfs subvolume list -o /var/lib/twine; ls -A /var/lib/twine; true"""


INSTALL = "DEBIAN_FRONTEND=noninteractive dpkg -i /root/{}.deb"
REFUSED = """twine-agent: the agent does not start; tasks run on. Why:
twine-agent: a task record has schema 2, this agent knows up to 1
  try: a newer agent wrote it: install that one again; tasks continue to run
twine-agent: mend that, then: dpkg --configure twine-agent
"""
AGENT = "systemctl show -p ActiveState,ExecMainStatus,NRestarts twine-agent.service"
FAILED = {"ActiveState=failed", "ExecMainStatus=78", "NRestarts=0"}
MORE = {  # changes of a later tree: file → replaced text → new text
    "later": {
        "pyproject.toml": ('version = "0.1.0"', 'version = "0.2.0"'),
        "agent/runtime/core/records.py": (
            "    task_id: str\n",
            '    task_id: str\n    later: str = "x"\n',
        ),
    },
    "newer": {
        "pyproject.toml": ('version = "0.1.0"', 'version = "0.3.0"'),
        "agent/runtime/journal.py": ("\nSCHEMA = 1\n", "\nSCHEMA = 2\n"),
    },
    "broken": {
        "pyproject.toml": ('version = "0.1.0"', 'version = "0.4.0"'),
        "agent/daemon.py": (
            "\n    stop = asyncio.Event()\n",
            '\n    raise RuntimeError("this release does not start")\n',
        ),
    },
}
"""`later` writes a field that ours does not know, `newer` records that ours cannot read, and the
agent of `broken` does not start."""


def changed_tree(into: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """Return a copy of this tree with other texts in some of its files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        source, there = ROOT / name, into / name
        if source.is_file():
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(source.read_bytes())
            there.chmod(source.stat().st_mode)
    for name, (old, new) in changes.items():
        text = (into / name).read_text()
        assert old in text, name
        (into / name).write_text(text.replace(old, new, 1))
    return into


class Packaged(OneGuest):
    """A guest with packages built from this tree, `ours`, and from others; built on demand."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="package")
        self.folder, self.there = folder, set[str]()

    def install(self, name: str) -> str:
        """Install a package with dpkg; return its output, with its exit code as the last line."""
        if name not in self.there:
            into = self.folder / name
            tree = changed_tree(into / "tree", MORE[name]) if name in MORE else ROOT
            package = build_package(into, print, tree)
            self.put(f"/root/{name}.deb", package.read_bytes())
            self.there.add(name)
        output = self.ssh(f"{INSTALL.format(name)} 2>&1; echo $?", timeout_s=1800)
        print(output)
        return output

    def installed(self, name: str) -> None:
        output = self.install(name)
        assert output.endswith("\n0\n"), output

    def seen(self, tasks: int) -> str:
        """Return the processes of t1, t2, … and their start times."""
        return self.ssh(SEEN.replace("TASKS", str(tasks)))

    def all_run(self, tasks: int) -> None:
        self.until("all are known to run", lambda: self.find(RUNS) == str(tasks))

    def begin(self, tasks: int) -> str:
        """Install our package and start this number of tasks; return the result of `seen`."""
        self.installed("ours")
        self.ssh("systemctl start twine-agent.service", timeout_s=900)
        self.ssh(RUN.replace("TASKS", str(tasks)), timeout_s=3600)
        self.all_run(tasks)
        before = self.seen(tasks)
        assert before.count("NRestarts=0") == tasks
        assert "MainPID=0" not in before
        return before

    def run_later(self, name: str, tasks: int) -> None:
        """Start one more task; `tasks` is the number of tasks including it."""
        self.ssh(f"{RUN_ONE} {name} --no-wait -- /bin/busybox sleep 1000000", timeout_s=900)
        self.all_run(tasks)

    def end(self, *names: str) -> None:
        """Stop the tasks, and purge the package with dpkg."""
        stop = f"for n in {' '.join(names)}; do twine-agent stop --no-wait $n; done"
        self.ssh(stop, timeout_s=3600)
        self.all_run(0)
        print(self.ssh("dpkg --purge twine-agent", timeout_s=1800))


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Packaged]:
    found = Packaged(tmp_path_factory.mktemp("packages"))
    found.up()
    found.put("/root/image.tar", busybox_image())
    yield found
    found.down()


@pytest.mark.behaviour("F-05", "F-07")
@pytest.mark.long
def test_records_that_an_older_package_cannot_read_stop_its_agent_and_no_task(
    guest: Packaged,
) -> None:
    """dpkg fails once and prints what to do; the newer package restores everything."""
    before = guest.begin(2)
    guest.installed("newer")
    guest.all_run(2)
    guest.run_later("later", 3)
    assert '{"schema": 2,' in guest.ssh("cat /var/lib/twine/journal/later.json")

    output = guest.install("ours")
    assert output.endswith("\n1\n"), output
    assert REFUSED in output
    agent = set(guest.ssh(AGENT).split())
    assert agent == FAILED
    for words in ("systemctl status twine-agent.service", "journalctl -u twine-agent.service"):
        assert "install that one again; tasks continue to run" in guest.ssh(
            f"{words} --no-pager || true"
        )
    assert guest.seen(2) == before
    later = guest.ssh("systemctl show -p MainPID -p InvocationID twine-task-later")
    again = guest.ssh("dpkg --configure twine-agent 2>&1; echo $?", timeout_s=1800)
    assert REFUSED in again
    assert again.endswith("\n1\n"), again
    assert set(guest.ssh(AGENT).split()) == FAILED  # no component retries without a command

    guest.installed("newer")
    guest.all_run(3)
    assert guest.seen(2) == before
    assert guest.ssh("systemctl show -p MainPID -p InvocationID twine-task-later") == later
    shown = json.loads(guest.ssh("twine-agent ps -o json"))["tasks"]
    assert [t["restarts"] for t in shown] == [0] * 3
    print(guest.ssh("twine-agent fsck", timeout_s=900))
    guest.end("t1", "t2", "later")


@pytest.mark.behaviour("F-07", "AV15")
@pytest.mark.long
def test_starts_of_a_failing_agent_back_off(guest: Packaged) -> None:
    """Otherwise the failing agent takes the CPU from the dpkg that installs a working one."""

    def agent(name: str) -> str:
        return guest.find(f"systemctl show -P {name} twine-agent.service")

    before = guest.begin(2)
    output = guest.install("broken")
    assert output.endswith("\n1\n"), output
    assert "this release does not start" in output
    guest.until("it waits as long as it ever does", lambda: agent("RestartUSecNext") == "30s")
    assert int(agent("NRestarts")) >= 5

    guest.installed("ours")
    guest.all_run(2)
    guest.until("its restarts are forgotten", lambda: agent("NRestarts") == "0")
    assert agent("RestartUSecNext") == "1s"
    assert guest.seen(2) == before
    guest.end("t1", "t2")


@pytest.mark.behaviour("F-02", "F-05")
@pytest.mark.long
def test_fifty_tasks_do_not_notice_an_upgrade_and_a_downgrade_by_package(guest: Packaged) -> None:
    """Six deaths of the agent are not noticed either. After its removal nothing is left on the
    host.
    """
    before = guest.begin(TASKS)

    for _ in range(6):
        guest.ssh("systemctl kill -s KILL twine-agent.service")
        guest.all_run(TASKS)
    assert guest.seen(TASKS) == before

    for name, known in (("later", TASKS), ("ours", TASKS + 1)):
        guest.installed(name)
        guest.all_run(known)
        assert guest.seen(TASKS) == before
        if name == "later":  # its record has a field that ours does not know
            guest.run_later("later", TASKS + 1)
            assert '"later":"x"' in guest.ssh("cat /var/lib/twine/journal/later.json")
    print(guest.ssh("twine-agent fsck", timeout_s=900))

    refused = guest.find("dpkg --remove twine-agent; echo $?")
    assert refused.endswith("1"), refused
    assert guest.seen(TASKS) == before
    guest.end("later", *(f"t{n}" for n in range(1, TASKS + 1)))
    assert guest.ssh(LEFT).strip() == ""
