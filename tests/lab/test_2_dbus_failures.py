"""D-Bus restarts, process 1 re-executes itself, D-Bus hangs: tasks are not affected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.images import busybox_image
from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="bus")
    found.up()
    found.put("/root/image.tar", busybox_image())
    found.put("/root/bus_load.py", Path(__file__).with_name("bus_load.py").read_text())
    found.ssh("systemctl start twine-agent.service", timeout_s=900)
    yield found
    found.down()


TRIES = """
while :; do
    for port in 0 28080 28081; do
        busybox timeout 1 busybox nc -l -p $port >/dev/null 2>&1
        [ $? = 1 ] && echo $port refused || echo $port bound
    done
    busybox sleep 1
done
"""
PORTS = {"0 bound", "28080 bound", "28081 refused"}


@pytest.mark.behaviour("BUG-AG10", "F-20")
def test_systemd_restarts_keep_a_task_restricted_to_its_ports(guest: OneGuest) -> None:
    """`daemon-reload` removed the programs that systemd attaches for ports."""
    run = "twine-agent run binds --image /root/image.tar --memory 16MiB --listen http=28080"
    guest.ssh(f"{run} -- /bin/busybox sh -c '{TRIES}'", timeout_s=900)

    def notifications() -> list[str]:
        return guest.ssh("twine-agent logs binds").splitlines()

    for disturbance in ("true", "systemctl daemon-reload", "systemctl daemon-reexec"):
        guest.ssh(disturbance, timeout_s=900)
        before = len(notifications())
        guest.until("three rounds more", lambda before=before: len(notifications()) > before + 9)  # type: ignore[misc]
        fresh = set(notifications()[before + 1 :])
        print(disturbance, sorted(fresh))
        assert fresh == PORTS
    guest.ssh("twine-agent stop binds", timeout_s=900)


@pytest.mark.behaviour("F-19", "F-20")
def test_bus_failures_lose_no_task_and_stall_no_answer(guest: OneGuest) -> None:
    """Under load, the agent's API answers while D-Bus is blocked.

    Three tasks run throughout. Another one starts and ends repeatedly, also after each disturbance.
    """
    run = "twine-agent run first --image /root/image.tar --memory 16MiB --restart never"
    guest.ssh(f"{run} -- /bin/busybox true", timeout_s=900)
    image = json.loads(guest.ssh("twine-agent show first -o json"))["task"]["image"]
    guest.ssh("twine-agent stop first", timeout_s=900)
    agent = guest.ssh("systemctl show -P MainPID twine-agent.service")
    command = f"/opt/twine/bin/python /root/bus_load.py {image}"
    found = json.loads(guest.ssh(command, timeout_s=3600.0).splitlines()[-1])

    print(found)
    assert found["changed"] == []
    assert found["answered_while_blocked"] > 0
    assert guest.ssh("systemctl show -P MainPID twine-agent.service") == agent
    guest.ssh("twine-agent fsck")
    units = guest.ssh("systemctl list-units --all --plain --no-legend 'twine-task-*'")
    assert {line.split()[0] for line in units.splitlines()} == {
        f"twine-task-stay-{n}.service" for n in (1, 2, 3)
    }
