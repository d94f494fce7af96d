"""The host's agent answers while sixty tasks start at once on one CPU and use all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.one_machine import OneMachine

pytestmark = pytest.mark.long
TASKS = 60
WORKING = 120
"""Number of answers from each server while all tasks work: one minute at two a second."""
LATE_S = 1.0
SHARE = 0.01
"""Share of the agent's answers that may be late beyond that of a server that only answers."""
IMAGE = """set -e
at=$(mktemp -d); chmod 755 $at; mkdir -p $at/{proc,sys,dev,tmp,run,var/tmp,etc,root}
of=$(ldd /usr/bin/stress-ng | grep -o '/[^ ]*')
tar -C / -chf - usr/bin/stress-ng $(echo "$of" | sed s:^/::) | tar -C $at -xf -
tar -C $at -cf /root/stress.tar ."""
JOB = """
entitlement = "shop"
tasks = {tasks}
image = "{image}"
command = ["/usr/bin/stress-ng", "--cpu", "1", "--temp-path", "/tmp", "--timeout", "0"]
cpus = 0.01
[limits]
memory_max_bytes = "40MiB"
tasks_max = 16
"""
AGENT, BARE = "/run/twine/agent.sock", "/run/bare.sock"


@dataclass(frozen=True)
class Answers:
    """Latencies of one server's answers in seconds, in their order."""

    took: tuple[float, ...]

    @property
    def late(self) -> int:
        return sum(s > LATE_S for s in self.took)

    def __str__(self) -> str:
        return f"{len(self.took)} answers, {self.late} late, slowest {max(self.took):.2f} s"

    def is_as_good_as(self, other: Answers) -> bool:
        """Return whether the share of late answers is about as small as the other's."""
        return self.late / len(self.took) <= other.late / len(other.took) + SHARE


class Requests:
    """Sends requests to the agent, and to a server that only answers, as long as both run."""

    def __init__(self, lab: OneMachine) -> None:
        self.lab, self.sockets = lab, {"agent": AGENT, "bare": BARE}
        code = Path(__file__).with_name("socket_probe.py").read_text()
        lab.ssh("m1", f"cat > /run/socket_probe.py <<'E'\n{code}E")
        self._unit("bare", f"answer {BARE}")
        lab.until("it answers", lambda: lab.ssh("m1", f"test -S {BARE} && echo y") == "y\n")
        for name, path in self.sockets.items():
            self._unit(f"ask-{name}", f"ask {path} /run/asked-{name}")

    def _unit(self, name: str, words: str) -> None:
        run = f"systemd-run --unit={name} --slice=hostcritical.slice"
        self.lab.ssh("m1", f"{run} /opt/twine/bin/python /run/socket_probe.py {words}")

    def so_far(self) -> dict[str, tuple[float, ...]]:
        """Return the latencies of both servers until now; fail if an answer is missing."""
        units = " ".join(f"ask-{name}" for name in self.sockets)
        assert self.lab.ssh("m1", f"systemctl is-active {units} || true").split() == ["active"] * 2
        outputs = {n: self.lab.ssh("m1", f"cat /run/asked-{n}") for n in self.sockets}
        return {n: tuple(map(float, text.splitlines()[:-1])) for n, text in outputs.items()}

    def end(self) -> None:
        self.lab.ssh("m1", "systemctl stop ask-agent ask-bare bare; rm -f /run/asked-* /run/bare*")


@pytest.fixture(scope="module")
def lab() -> Iterator[OneMachine]:
    found = OneMachine("busy", cpus=1, memory_mib=3072)
    found.up()
    yield found
    found.down()


def image_of(lab: OneMachine, folder: Path) -> str:
    """Return the digest of an image with stress-ng, made from the machine's own packages."""
    lab.ssh("m1", f"bash <<'E'\n{IMAGE}\nE")
    file = folder / "stress.tar"
    file.write_bytes(lab.read("/root/stress.tar"))
    found: str = lab.ctl("image", "push", str(file))["digest"]
    return found


@pytest.mark.behaviour("F-11", "BUG-AG3")
def test_an_agent_answers_while_sixty_tasks_start_at_once_and_take_the_only_cpu(
    lab: OneMachine, tmp_path: Path
) -> None:
    """The agent is late about as rarely as a server that only answers, and is not silent."""
    image = image_of(lab, tmp_path)
    lab.ctl("entitlement", "create", "shop", "--machines", "1", "--host-profile", "base")
    agent = lab.ssh("m1", "systemctl show twine-agent.service -P MainPID -P NRestarts")
    requests = Requests(lab)

    lab.deploy("busy", tmp_path, JOB.format(tasks=TASKS, image=image))
    starting = requests.so_far()

    def working() -> dict[str, tuple[float, ...]]:
        return {name: took[len(starting[name]) :] for name, took in requests.so_far().items()}

    lab.until(
        f"{WORKING} answers of each", lambda: all(len(t) >= WORKING for t in working().values())
    )
    ended = working()
    job = lab.job("busy")
    [machine] = lab.machine_list()
    requests.end()

    for phase, took in (("starting", starting), ("working", ended)):
        found = {name: Answers(of) for name, of in took.items()}
        print(f"{phase}: agent {found['agent']}; bare responder {found['bare']}")
        assert found["agent"].is_as_good_as(found["bare"]), phase
    assert (job["healthy"], job["phase"]) == (TASKS, "stable")
    assert machine["record"]["state"] == "up"
    events = machine["record"]["unavailability"]
    assert [e for e in events if e["kind"] == "failure"] == [], events
    tasks = json.loads(lab.ssh("m1", "twine-agent ps -o json"))["tasks"]
    assert [t["restarts"] for t in tasks] == [0] * TASKS
    assert lab.ssh("m1", "systemctl show twine-agent.service -P MainPID -P NRestarts") == agent
