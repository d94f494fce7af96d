"""No task moves because a component was paused, is busy, or has a wrong clock.

One phase of six minutes serves several tests. Meanwhile the control plane is paused, one host is
under load, and the clock of another is two hours ahead.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.lab_client import WAIT_S, LabClient

STILL_S = 360.0
"""Longer than any time after which a silent machine is declared down."""
STAYS_S = 30.0
"""Three times as long as a machine may be silent before it is declared down."""
TWO_HOURS_S = 7200
LOAD = "--cpu 4 --io 2 --vm 1 --vm-bytes 96M --hdd 1 --hdd-bytes 64M"
_ASK = """
import json, socket, time
late = []
while True:
    began = time.monotonic()
    with socket.socket(socket.AF_UNIX) as s:
        s.connect("/run/twine/agent.sock")
        s.sendall(b"GET /healthz HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
        assert b" 200 " in s.recv(4096)
    late.append(time.monotonic() - began)
    with open("/run/asked.json", "w") as file:
        json.dump({"asked": len(late), "slowest_s": max(late)}, file)
    time.sleep(0.2)
"""

pytestmark = pytest.mark.long
Places = dict[int, tuple[str, int]]
SetClock = Callable[[int], None]


def _stays(lab: LabClient, places: Places) -> None:
    """Assert that for a while no machine is declared down and no task moves.

    A machine that does not answer at this very moment is allowed: it may be busy.
    """
    end = time.monotonic() + STAYS_S
    received = False
    while time.monotonic() < end or not received:
        machines = lab.machine_list()
        received = received or all(m["ready"] for m in machines)
        down = [m["record"] for m in machines if m["record"]["state"] != "up"]
        assert not down, lab.run("twinectl", "machine", "list")
        assert _places(lab) == places
        assert time.monotonic() < end + WAIT_S, lab.run("twinectl", "machine", "held-back")


def _places(lab: LabClient) -> Places:
    """Return the place and the generation of each task; health may suffer under load."""
    return {i: (t["placement"]["machine"], t["generation"]) for i, t in lab.tasks().items()}


def _agent(lab: LabClient, machine: str) -> str:
    return lab.ssh(machine, "systemctl show twine-agent.service -P MainPID -P NRestarts")


@pytest.fixture(scope="module")
def set_clock(the_lab: LabClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SetClock]:
    """Yield a function that sets the control plane's clock ahead by this number of seconds."""
    folder = tmp_path_factory.mktemp("clock")
    file, library = folder / "ahead", folder / "other_time.so"
    source = Path(__file__).with_name("other_time.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-o", library, source, "-ldl"], check=True)

    def ahead(seconds: int) -> None:
        file.write_text(f"{seconds}\n")

    ahead(0)
    the_lab.lab("control-plane", "stop")
    environment = {"LD_PRELOAD": str(library), "TWINE_TEST_AHEAD": str(file)}
    the_lab.lab("control-plane", "start", environment=environment)
    yield ahead
    the_lab.lab("control-plane", "stop")
    the_lab.lab("control-plane", "start")


@dataclass
class Phase:
    """The state before six minutes without a control plane, and the hosts' reports meanwhile."""

    before: dict[str, str]
    places: Places
    agents: dict[str, str]


@pytest.fixture(scope="module")
def phase(
    the_lab: LabClient, images: dict[str, str], entitlement: str, set_clock: SetClock
) -> Iterator[Phase]:
    lab = the_lab
    lab.spread(images["v1"], 6)
    phase = Phase(lab.invocations(), _places(lab), {m: _agent(lab, m) for m in lab.machines})
    lab.lab("control-plane", "pause")
    began = time.monotonic()
    lab.ssh("m1", f"date -s @$(( $(date +%s) + {TWO_HOURS_S} ))")
    lab.ssh("m2", f"cat > /run/ask.py <<'E'\n{_ASK}\nE")
    lab.ssh("m2", f"systemd-run --unit=load --slice=workload.slice stress-ng {LOAD}")
    lab.ssh("m2", "systemd-run --unit=ask --slice=hostcritical.slice python3 /run/ask.py")
    time.sleep(max(0.0, STILL_S - (time.monotonic() - began)))
    lab.lab("control-plane", "continue")
    yield phase
    lab.ssh("m2", "systemctl stop load.service ask.service || true")
    lab.rest()


@pytest.mark.behaviour("BUG-CP3")
def test_a_control_plane_paused_for_six_minutes_moves_nothing(
    the_lab: LabClient, phase: Phase
) -> None:
    """A resumed control plane took its own pause for silence of all machines."""
    _stays(the_lab, phase.places)


@pytest.mark.behaviour("BUG-CP21", "BUG-AG3")
def test_a_host_under_load_keeps_answering(the_lab: LabClient, phase: Phase) -> None:
    """A busy host did not answer for 23 s and was declared down."""
    assert the_lab.ssh("m2", "systemctl is-active load.service").strip() == "active"
    outcome = json.loads(the_lab.ssh("m2", "cat /run/asked.json"))
    print("under load:", outcome)
    assert the_lab.ssh("m2", "systemctl is-active ask.service").strip() == "active"
    the_lab.ssh("m2", "systemctl stop load.service ask.service")
    assert _agent(the_lab, "m2") == phase.agents["m2"]
    assert the_lab.invocations() == phase.before


@pytest.mark.behaviour("F-63", "BUG-AG14")
def test_a_host_whose_clock_jumps_by_two_hours_and_back_moves_nothing(
    the_lab: LabClient, phase: Phase
) -> None:
    """The clock was two hours ahead for the whole phase; now it is set back."""
    the_lab.ssh("m1", f"date -s @$(( $(date +%s) - {TWO_HOURS_S} ))")
    _stays(the_lab, phase.places)
    assert _agent(the_lab, "m1") == phase.agents["m1"]
    assert the_lab.invocations() == phase.before


@pytest.mark.behaviour("F-63", "BUG-CP9")
def test_a_control_plane_whose_clock_jumps_by_two_hours_and_back_moves_nothing(
    the_lab: LabClient, phase: Phase, set_clock: SetClock
) -> None:
    """Durations are not computed from the time of day."""
    for seconds in (TWO_HOURS_S, 0):
        set_clock(seconds)
        _stays(the_lab, phase.places)
    assert the_lab.invocations() == phase.before
