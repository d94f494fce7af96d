"""stress-ng inside a task stays within each of its limits, and its neighbour still answers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab.images import busybox_image
from tests.lab.one_guest import OneGuest
from tests.lab.test_2_busy_host import IMAGE, Answers

pytestmark = pytest.mark.long
CORES, MEMORY, PIDS = 0.5, 64 << 20, 24
TASK = f"""
[limits]
cpu_max_cores = {CORES}
memory_max_bytes = {MEMORY}
tasks_max = {PIDS}
"""
STRESS = (
    "/usr/bin/stress-ng --cpu 2 --vm 1 --vm-bytes 24M --fork 8 --pipe 2 --switch 2"
    " --temp-path /tmp --timeout 0"
)
GROUP = "/sys/fs/cgroup/workload.slice/workload-local.slice/twine-task-stress.service"
WINDOW_S = 30
PORTS = {"neighbour": 20001, "bare": 20002}
ASK = """
import http.client, json, sys, time
took = {name: [] for name in sys.argv[2:]}
for _ in range(int(sys.argv[1])):
    for word in took:
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", int(word), timeout=60)
        connection.request("GET", "/")
        connection.getresponse().read()
        connection.close()
        took[word].append(time.monotonic() - began)
    time.sleep(0.1)
print(json.dumps(took))
"""
SAMPLE = f"""
cd {GROUP}
for n in $(seq {WINDOW_S}); do
    echo "$(cut -d. -f1,2 /proc/uptime | cut -d' ' -f1) $(sed -n 's/^usage_usec //p' cpu.stat)" \\
        "$(cat memory.current pids.current | tr '\\n' ' ')"
    sleep 1
done
"""


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="stress", cpus=1)
    found.up()
    found.ssh(f"bash <<'E'\n{IMAGE}\nE", timeout_s=900)
    found.put("/root/plain.tar", busybox_image())
    found.put("/root/task.toml", TASK)
    found.put("/root/ask.py", ASK)
    found.ssh("systemctl start twine-network.socket twine-agent.service", timeout_s=900)
    serve = "/bin/busybox httpd -f -h /etc -p {}"
    run = f"twine-agent run neighbour --image /root/plain.tar --listen web={PORTS['neighbour']}"
    found.ssh(f"{run} -- {serve.format(PORTS['neighbour'])}", timeout_s=900)
    found.ssh("tar -xf /root/plain.tar -C /root bin/busybox")
    found.ssh(f"systemd-run -q --unit=bare /root{serve.format(PORTS['bare'])}")
    yield found
    found.down()


def answers(guest: OneGuest) -> dict[str, Answers]:
    """Send requests to the neighbour and to a server outside of tasks; return their latencies."""
    ports = " ".join(str(port) for port in PORTS.values())
    took = json.loads(guest.ssh(f"python3 /root/ask.py 100 {ports}", timeout_s=1800))
    return {name: Answers(tuple(took[str(port)])) for name, port in PORTS.items()}


@pytest.mark.behaviour("AG8")
def test_a_task_under_stress_keeps_its_limits_and_its_neighbour_answers(guest: OneGuest) -> None:
    """CPU, memory and processes, by the kernel's own count; no task restarts."""
    run = "twine-agent run stress --image /root/stress.tar --file /root/task.toml"
    guest.ssh(f"{run} -- {STRESS}", timeout_s=900)
    refused = f"sed -n 's/^max //p' {GROUP}/pids.events"
    guest.until("it has all processes that it may have", lambda: int(guest.ssh(refused)) > 0)

    samples = [[float(word) for word in line.split()] for line in guest.ssh(SAMPLE).splitlines()]
    found = answers(guest)

    (began, used, *_), (ended, used_then, *_) = samples[0], samples[-1]
    share = (used_then - used) / 1e6 / (ended - began)
    peak = int(guest.ssh(f"cat {GROUP}/memory.peak"))
    print(f"CPUs {share:.3f} of {CORES}, memory {peak} of {MEMORY} bytes;", end=" ")
    print(f"neighbour {found['neighbour']}; bare responder {found['bare']}")
    assert CORES / 4 < share < CORES * 1.05, "it works, and at most as much as it may"
    assert max(sample[2] for sample in samples) <= peak <= MEMORY
    assert PIDS // 2 < max(sample[3] for sample in samples) <= PIDS
    assert found["neighbour"].is_as_good_as(found["bare"])
    tasks = json.loads(guest.ssh("twine-agent ps -o json"))["tasks"]
    assert {t["task_id"]: (t["state"], t["restarts"]) for t in tasks} == {
        "neighbour": ("running", 0),
        "stress": ("running", 0),
    }
