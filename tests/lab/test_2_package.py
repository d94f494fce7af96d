"""The agent's Debian package on a host with fifty tasks: another version, back, and away."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.one_guest import OneGuest, busybox_image
from tests.lab.the_lab import ROOT
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


def tree_of_the_next_version(into: Path) -> Path:
    """Return a copy of this tree with another version, and a field in records that ours has not."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        source, there = ROOT / name, into / name
        if source.is_file():
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(source.read_bytes())
            there.chmod(source.stat().st_mode)
    changed = {
        "pyproject.toml": ('version = "0.1.0"', 'version = "0.2.0"'),
        "agent/core/records.py": ("    task_id: str\n", '    task_id: str\n    later: str = "x"\n'),
    }
    for name, (old, new) in changed.items():
        text = (into / name).read_text()
        assert old in text, name
        (into / name).write_text(text.replace(old, new, 1))
    return into


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The package of this tree, and that of a later one."""
    folder = tmp_path_factory.mktemp("packages")
    later = tree_of_the_next_version(folder / "later")
    return build_package(folder, print), build_package(folder, print, later)


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="package")
    found.up()
    yield found
    found.down()


@pytest.mark.long
def test_fifty_tasks_do_not_notice_an_upgrade_and_a_downgrade_by_package(
    guest: OneGuest, packages: tuple[Path, Path]
) -> None:
    """F-02 F-05 P1: nor six deaths of the agent; and what is removed leaves nothing on the host."""
    for package, name in zip(packages, ("ours", "later"), strict=True):
        put = f"cat > /root/{name}.deb"
        guest.lab("ssh", "m1", "--", put, stdin=package.read_bytes())
    guest.lab("ssh", "m1", "--", "cat > /root/image.tar", stdin=busybox_image())
    install = "DEBIAN_FRONTEND=noninteractive dpkg -i /root/{}.deb"
    print(guest.ssh(install.format("ours"), timeout_s=1800))
    guest.ssh("systemctl start twine-agent.service", timeout_s=900)
    guest.ssh(RUN.replace("TASKS", str(TASKS)), timeout_s=3600)
    guest.until("all run", lambda: guest.find(RUNS) == str(TASKS))
    before = guest.ssh(SEEN.replace("TASKS", str(TASKS)))
    assert before.count("NRestarts=0") == TASKS
    assert "MainPID=0" not in before

    for _ in range(6):
        guest.ssh("systemctl kill -s KILL twine-agent.service")
        guest.until("all are known to run", lambda: guest.find(RUNS) == str(TASKS))
    assert guest.ssh(SEEN.replace("TASKS", str(TASKS))) == before

    for name, known in (("later", TASKS), ("ours", TASKS + 1)):
        print(guest.ssh(install.format(name), timeout_s=1800))
        guest.until("all are known to run", lambda n=known: guest.find(RUNS) == str(n))
        assert guest.ssh(SEEN.replace("TASKS", str(TASKS))) == before
        if name == "later":  # whose record has a field that ours does not know
            guest.ssh(f"{RUN_ONE} later --no-wait -- /bin/busybox sleep 1000000", timeout_s=900)
            guest.until("the new one runs", lambda: guest.find(RUNS) == str(TASKS + 1))
            assert '"later":"x"' in guest.ssh("cat /var/lib/twine/journal/later.json")
    print(guest.ssh("twine-agent fsck", timeout_s=900))

    refused = guest.find("dpkg --remove twine-agent; echo $?")
    assert refused.endswith("1"), refused
    assert guest.ssh(SEEN.replace("TASKS", str(TASKS))) == before
    stop = f"for n in later $(seq -f t%g 1 {TASKS}); do twine-agent stop --no-wait $n; done"
    guest.ssh(stop, timeout_s=3600)
    guest.until("none is left", lambda: guest.find(RUNS) == "0")
    print(guest.ssh("dpkg --purge twine-agent", timeout_s=1800))
    assert guest.ssh(LEFT).strip() == ""
