"""The bus restarts, process 1 replaces itself, the bus stands still: tasks do not notice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.one_guest import OneGuest, busybox_image

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="bus")
    found.up()
    found.lab("ssh", "m1", "--", "cat > /root/image.tar", stdin=busybox_image())
    found.put("/root/bus_load.py", Path(__file__).with_name("bus_load.py").read_text())
    found.ssh("systemctl start twine-agent.service", timeout_s=900)
    yield found
    found.down()


def test_what_happens_to_the_bus_loses_no_task_and_stalls_no_answer(guest: OneGuest) -> None:
    """F-19 F-20: under load; the agent's face answers while nobody speaks on the bus.

    Three tasks stay as they are, one comes and goes throughout, also after each disturbance.
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
