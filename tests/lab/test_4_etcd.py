"""Real etcd in three tasks: what a controller saves an ensemble in a rolling restart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab.lab_client import BIN, COMMAND_S, NAME, LabClient
from vm_lab.image.programs import build_program
from vm_lab.sandbox import LabSandbox
from vm_lab.state import LabPaths

pytestmark = [pytest.mark.lab, pytest.mark.long]
CLIENT = Path(__file__).with_name("etcd_client.py")
CONTROLLER = "10.77.0.2"
"""An address next to the control plane's own, which no job may name."""
START = """
me=http://10.77.0.1$${TWINE_MACHINE#m}
all=http://10.77.0.11:$PORT,http://10.77.0.12:$PORT,http://10.77.0.13:$PORT
ctl="etcdctl --endpoints=$(echo $all | sed "s|$me:$PORT,*||; s|,$||") --command-timeout=30s"
state=new
if known=$($ctl member list); then
    id=$(echo "$known" | sed -n "s|^\\([0-9a-f]*\\), [^,]*, [^,]*, $me:$PEER,.*|\\1|p")
    if [ -n "$id" ]; then
        $ctl member remove $id
        $ctl member add $TWINE_MACHINE --peer-urls=$me:$PEER
        state=existing
    fi
fi
exec /usr/bin/start --name=$TWINE_MACHINE --initial-cluster-state=$state \\
    --listen-client-urls=http://0.0.0.0:$PORT --advertise-client-urls=$me:$PORT \\
    --listen-peer-urls=http://0.0.0.0:$PEER --initial-advertise-peer-urls=$me:$PEER \\
    --initial-cluster=$(for n in 1 2 3; do printf "m$n=http://10.77.0.1$n:$PEER,"; done) \\
    --heartbeat-interval=500 --election-timeout=5000
"""
"""A member that starts with no data joins again in its old place as a new member, which needs a
majority of the others. The election timeout is long: members are emulated and may be slow.
"""
JOB = """
name = "etcd"
entitlement = "demo"
tasks = 3
image = "{image}"
command = ["/bin/sh", "-c", {start}]
ports = ["main", "peer"]

[environment]
PORT = "${{port:main}}"
PEER = "${{port:peer}}"

[limits]
memory_max_bytes = "300MiB"
tasks_max = 64

[probe]
kind = "tcp"
port = "main"

{controller}
"""
QUORUM = """
job = "etcd"
listen = "{at}:7450"
credential = "{credential}"

[quorum]
speaks = "etcd"
members = {members}
"""


def apply(lab: LabClient, folder: Path, image: str, controller: str = "") -> None:
    file = folder / "etcd.toml"
    start = json.dumps(START)
    file.write_text(JOB.format(image=image, start=start, controller=controller))
    lab.run("twinectl", "job", "apply", str(file), "--wait", "--timeout", "900s", timeout_s=1000)


def members(lab: LabClient) -> list[str]:
    """Return the addresses of the tasks by index; the members use one port for their peers."""
    found = sorted(lab.ctl("job", "endpoints", "etcd")["endpoints"], key=lambda e: str(e["task"]))
    assert len({e["ports"]["peer"] for e in found}) == 1
    return [f"http://{e['host']}:{e['ports']['main']}" for e in found]


@contextmanager
def in_the_lab(*arguments: str, **given: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in the lab's network; it ends when its input closes, or is terminated."""
    command = LabSandbox(LabPaths(NAME)).command(arguments)
    with subprocess.Popen(command, stdin=subprocess.PIPE, **given) as process:
        try:
            yield process
        finally:
            process.terminate()


def restarted(lab: LabClient) -> dict[str, Any]:
    """Restart all members in turn under constant writes; return the client's result."""
    urls = members(lab)
    with in_the_lab(sys.executable, str(CLIENT), *urls, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"leads\n"
        before = lab.job("etcd")["record"]["version"]
        lab.run("twinectl", "job", "restart", "etcd", "--wait", timeout_s=2 * COMMAND_S)
        assert lab.job("etcd")["record"]["version"] > before
        out, _ = client.communicate(timeout=COMMAND_S)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    print(found)
    return found


@pytest.mark.behaviour("TC13")
def test_an_ensemble_changes_its_leader_once_in_a_rolling_restart(
    the_lab: LabClient, entitlement: str, tmp_path: Path
) -> None:
    """Followers restart first, the leader last; no acknowledged write is lost.

    Without a controller, a job restarts in order, and the leader is the first. The next leader is
    then still to be restarted, so that costs at least two changes.
    """
    lab = the_lab
    image = lab.ctl("image", "push", str(build_program("etcd", print)))["digest"]
    apply(lab, tmp_path, image)
    alone = restarted(lab)
    assert alone["lost"] == []
    assert alone["acknowledged"] > 50
    assert alone["leader_changes"] >= 2

    lab.lab("exec", "--", "ip", "address", "add", f"{CONTROLLER}/24", "dev", "br-lab")
    credential, file = tmp_path / "controller.json", tmp_path / "controller.toml"
    state = f"/var/lib/twine-lab/{NAME}/control-plane"
    lab.run(
        "twine-control-plane",
        *("controller", "add", "etcd", "--host", CONTROLLER),
        *("--out", str(credential), "--state", state),
    )
    urls = json.dumps(members(lab))
    file.write_text(QUORUM.format(at=CONTROLLER, credential=credential, members=urls))
    with in_the_lab(str(BIN / "twine-taskcontroller"), "serve", str(file)):
        controller_config = f'[controller]\nurl = "https://{CONTROLLER}:7450"\nname = "etcd"\n'
        apply(lab, tmp_path, image, controller_config)
        led = restarted(lab)
        lab.run("twinectl", "job", "stop", "etcd", "--wait")
    assert led["lost"] == []
    assert led["acknowledged"] > 50
    assert led["leader_changes"] == 1
