"""The network of a host and its control plane loses, delays, duplicates and reorders packets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.images import busybox_image
from tests.lab.one_machine import OneMachine

pytestmark = pytest.mark.long
TASKS = 6
LOST = 60
"""Number of packets to lose while all tasks just run."""
NETEM = "delay 300ms 100ms 25% loss 20% duplicate 10% reorder 10% 50%"
WORSEN = f"""set -e; modprobe sch_netem
tc qdisc add dev eth0 root handle 1: prio bands 3 priomap {" ".join("2" * 16)}
tc filter add dev eth0 parent 1: protocol ip u32 match ip sport 22 0xffff flowid 1:1
tc qdisc add dev eth0 parent 1:3 handle 30: netem {NETEM}"""
"""Everything that the host sends, except answers to this test's own ssh."""
JOB = """
entitlement = "shop"
tasks = {tasks}
image = "{image}"
command = ["/bin/busybox", "sleep", "1000000"]
cpus = 0.01
[environment]
EDITION = "{edition}"
[limits]
memory_max_bytes = "16MiB"
[update]
max_unavailable = 3
"""
STARTED = "39f53479d3a045ac8e11786248231fbf"
"""Message id of systemd for a started unit (SD_MESSAGE_UNIT_STARTED)."""


@pytest.fixture(scope="module")
def lab() -> Iterator[OneMachine]:
    found = OneMachine("network")
    found.up()
    yield found
    found.down()


def sent(lab: OneMachine) -> dict[str, Any]:
    """Return the number of packets sent over the bad network, and the number lost in addition."""
    shown = json.loads(lab.ssh("m1", "tc -s -j qdisc show dev eth0"))
    [netem] = [q for q in shown if q["kind"] == "netem"]
    return {key: netem[key] for key in ("packets", "drops")}


def starts(lab: OneMachine) -> Counter[str]:
    """Return the number of starts of each task's unit, from the host's journal."""
    output = lab.ssh("m1", f"journalctl -o json --output-fields=UNIT MESSAGE_ID={STARTED}")
    units = (json.loads(line).get("UNIT", "") for line in output.splitlines())
    return Counter(unit for unit in units if unit.startswith("twine-task-"))


@pytest.mark.behaviour("F-48", "F-53")
def test_orders_over_a_bad_network_run_once_and_running_tasks_are_kept(
    lab: OneMachine, tmp_path: Path
) -> None:
    """A job is applied, updated and stopped while 20 % of the sent packets are lost."""
    file = tmp_path / "image.tar"
    file.write_bytes(busybox_image())
    image = lab.ctl("image", "push", str(file))["digest"]
    lab.ctl("entitlement", "create", "shop", "--machines", "1", "--host-profile", "base")
    units = [f"twine-task-web-{n}.service" for n in range(TASKS)]
    agent = lab.ssh("m1", "systemctl show twine-agent.service -P MainPID -P NRestarts")
    lab.ssh("m1", WORSEN)

    lab.deploy("web", tmp_path, JOB.format(tasks=TASKS, image=image, edition="first"))
    assert starts(lab) == Counter(units)
    first = lab.invocations()
    print("applied:", sent(lab))

    before = sent(lab)["drops"]
    lab.until("as many more are lost", lambda: sent(lab)["drops"] >= before + LOST)
    lab.until("it is stable", lambda: lab.job("web")["phase"] == "stable")
    assert lab.invocations() == first
    print("ran:", sent(lab))

    lab.deploy("web", tmp_path, JOB.format(tasks=TASKS, image=image, edition="second"))
    assert starts(lab) == Counter(units * 2)
    second = lab.invocations()
    assert sorted(second) == sorted(first)
    assert not {*second.values()} & {*first.values()}
    tasks = json.loads(lab.ssh("m1", "twine-agent ps -o json"))["tasks"]
    assert [t["restarts"] for t in tasks] == [0] * TASKS
    print("updated:", sent(lab))

    stop = ("job", "stop", "web", "--wait", "--timeout", "1200s")
    lab.run("twinectl", *stop, timeout_s=1800)
    assert lab.units("m1") == []
    print("stopped:", sent(lab))

    lab.ssh("m1", "tc qdisc del dev eth0 root")
    lab.usable()
    assert lab.ctl("job", "list")["jobs"] == []
    assert json.loads(lab.ssh("m1", "twine-agent ps -o json"))["tasks"] == []
    assert starts(lab) == Counter(units * 2)
    assert "all is accounted for" in lab.ssh("m1", "twine-agent fsck")
    assert lab.ssh("m1", "systemctl show twine-agent.service -P MainPID -P NRestarts") == agent
    [machine] = lab.machine_list()
    failures = [e for e in machine["record"]["unavailability"] if e["kind"] == "failure"]
    print(f"taken for down {len(failures)} times")
