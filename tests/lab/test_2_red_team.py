"""A task that attacks its host in 65 ways (F-84), and the exposure of units on a real systemd.

The table of docs/security.md is the output of this test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.images import HERE, program_image
from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.behaviour("F-84")

SOURCE = HERE / "red_team.c"
GATES = {
    "twine-task-neighbour.service": 1.5,
    "twine-agent.service": 2.0,
    "twine-fence.service": 2.0,
    "twine-network.service": 4.6,
    "twine-output.service": 2.0,
}
"""Exposure out of 10; less is better."""
LISTENER = """
import socket, time
held = socket.socket(socket.AF_UNIX)
held.bind("\\0twine-red-team")
held.listen()
time.sleep(1e6)
"""


def names() -> list[str]:
    """Return the names of all probes, in order."""
    return re.findall(r'^ +P\("([^"]+)"', SOURCE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="red")
    found.up()
    yield found
    found.down()


@pytest.mark.behaviour("F-84", "AG8")
@pytest.mark.long
def test_f84_a_task_reaches_nothing_of_its_host(guest: OneGuest, tmp_path: Path) -> None:
    """Every probe is refused, and the exposure of units is as low as promised."""
    guest.ssh("systemctl start twine-agent.service", timeout_s=900)
    guest.put("/root/red.tar", program_image("red_team.c", "red_team", tmp_path))
    guest.ssh("systemd-run -q --unit=on-7443 python3 -m http.server 7443 --bind 127.0.0.1")
    guest.ssh("touch /dev/shm/of-the-host")
    guest.ssh(f"systemd-run -q --unit=abstract python3 -c '{LISTENER}'")
    run = "twine-agent run {} --image /root/red.tar --memory 16MiB {} -- /red_team {}"
    guest.ssh(run.format("neighbour", "", ""), timeout_s=900)
    pid = guest.ssh("systemctl show -P MainPID twine-task-neighbour.service").strip()
    guest.ssh(run.format("red", "--restart never --no-wait", f"8080 {pid}"), timeout_s=900)
    guest.until("all probes answered", lambda: "over\tyes" in guest.find("twine-agent logs red"))
    log = guest.ssh("twine-agent logs red")
    found = dict(line.split("\t") for line in log.splitlines() if "\t" in line)
    scores = {unit: exposure(guest, unit) for unit in GATES}

    print(table(found, scores))
    assert found.pop("over") == "yes"
    assert list(found) == names()
    assert {name for name, result in found.items() if result in ("REACHED", "0")} == set()
    assert {u for u, score in scores.items() if score > GATES[u]} == set()
    mounts = guest.ssh(f"cat /proc/{pid}/mountinfo").splitlines()
    below_sys = [m.split()[4:6] for m in mounts if re.match(r"/sys(/|$)", m.split()[4])]
    assert [path for path, _ in below_sys][:1] == ["/sys"]
    assert {path for path, how in below_sys if "ro" not in how.split(",")} == set()
    neighbour = json.loads(guest.ssh("twine-agent show neighbour -o json"))["task"]
    assert (neighbour["state"], neighbour["restarts"]) == ("running", 0)


def exposure(guest: OneGuest, unit: str) -> float:
    """Return the exposure that `systemd-analyze security` reports for a unit."""
    log = guest.ssh(f"systemd-analyze security {unit} --no-pager | tail -1")
    found = re.search(r"exposure level for .*: (\d+\.\d) ", log)
    assert found, log
    return float(found[1])


def table(found: dict[str, str], scores: dict[str, float]) -> str:
    """Return the results as Markdown."""
    lines = ["| it tries | and gets |", "|---|---|"]
    lines += [f"| {name} | {result} |" for name, result in found.items() if name != "over"]
    lines += ["", "| unit | exposure | at most |", "|---|---|---|"]
    lines += [f"| `{unit}` | {score} | {GATES[unit]} |" for unit, score in scores.items()]
    return "\n".join(lines)
