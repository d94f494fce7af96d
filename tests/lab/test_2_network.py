"""What tasks can reach, and what they cannot, on a machine of the lab."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.lab.lab_client import JOB, LabClient

BINDS = (
    "busybox nc -l -p {0} </dev/null >/dev/null 2>&1 &"
    " until busybox grep -q ':{0:04X} .* 0A ' /proc/self/net/tcp /proc/self/net/tcp6;"
    " do sleep 0.2; done; echo {0}: bound"
)
REFUSED = "busybox nc -l -p {0} </dev/null >/dev/null 2>&1 && echo {0}: ended || echo {0}: refused"
"""Both wait for the expected result; if it does not occur, the task never completes."""


def by_hand(lab: LabClient, name: str, script: str, *options: str) -> dict[str, str]:
    """Run a script as a task on m1 until it prints `done`; return its printed values by name."""
    image = lab.job()["record"]["spec"]["image"]
    words = ["twine-agent", "run", name, "--image", image, "--restart", "never", "--no-wait"]
    words += ["--memory", "16M", *options, "--", "/bin/sh", "-c", script + "\necho done: yes"]
    lab.ssh("m1", shlex.join(words))
    lab.until(f"{name} is done", lambda: "done: yes" in lab.ssh("m1", f"twine-agent logs {name}"))
    log = lab.ssh("m1", f"twine-agent logs {name}")
    print(log)
    lab.remove("m1", name)
    return dict(line.split(": ", 1) for line in log.splitlines() if ": " in line)


@pytest.mark.behaviour("BUG-AG10", "AG8")
@pytest.mark.long
def test_a_task_binds_only_its_ports_and_cannot_open_a_unix_socket(web: LabClient) -> None:
    """The task is in the host's network, and the kernel itself refuses."""
    parts = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{part}_temp_path /tmp/{part};" for part in parts)
    nginx = (
        "printf 'pid /tmp/p; events {} http { access_log off; %s server { listen unix:/tmp/s; } }'"
        f" '{paths}' >/tmp/c; nginx -e stderr -t -c /tmp/c >/tmp/output 2>&1;"
        " busybox grep -q 'socket() unix:.*not supported' /tmp/output && echo unix: refused;"
        " busybox grep -q 'test is successful' /tmp/output && echo unix: open; true"
    )
    binds = [BINDS.format(18080), REFUSED.format(18081), REFUSED.format(7443)]
    script = "\n".join([*binds, nginx])

    assert by_hand(web, "binder", script, "--listen", "http=18080") == {
        "18080": "bound",
        "18081": "refused",
        "7443": "refused",
        "unix": "refused",
        "done": "yes",
    }
    assert by_hand(web, "opener", nginx, "--unix-sockets")["unix"] == "open"


@pytest.mark.behaviour("BUG-AG10")
def test_the_agents_port_stays_reserved_while_the_agent_is_stopped(web: LabClient) -> None:
    take = (
        "import socket; s = socket.socket();"
        " s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1);"
        " s.bind(('0.0.0.0', 7443))"
    )
    call = "import socket; socket.create_connection(('127.0.0.1', 7443))"
    web.ssh("m1", "systemctl stop twine-agent.service")
    try:
        for program, answer in ((take, "Address already in use"), (call, "Connection refused")):
            log = web.ssh("m1", f"/opt/twine/bin/python -c {shlex.quote(program)} 2>&1 || true")
            assert answer in log
    finally:
        web.ssh("m1", "systemctl start twine-agent.service")
    web.rest()


@pytest.mark.behaviour("SD4")
@pytest.mark.long
def test_tasks_of_a_private_job_find_each_other_by_the_addresses_of_discovery(
    web: LabClient, images: dict[str, str], tmp_path: Path
) -> None:
    """Each answers at its own address, for its host and for a task of its job on another host."""
    web.apply(images["v1"], "tasks=1")
    text = JOB.read_text().replace('name = "web"\n', 'name = "own"\n')
    text = text.replace("tasks = 6\n", "tasks = 2\n")
    file = tmp_path / "own.toml"
    file.write_text(f'{text}\n[network]\nmode = "private"\nallow_from = ["own"]\n')
    image = f"image={images['v1']}"
    web.run("twinectl", "job", "apply", str(file), "--set", image, "--wait")

    listed = web.ctl("job", "endpoints", "own")["endpoints"]
    print(listed)
    assert len({e["host"] for e in listed}) == len({e["machine"] for e in listed}) == 2
    for one, other in (listed, listed[::-1]):
        url = f"http://[{one['host']}]:{one['ports']['http']}/"
        by_its_host = web.ssh(one["machine"], f"curl --fail --silent --globoff {shlex.quote(url)}")
        get = ("busybox", "wget", "-q", "-O", "-", url)
        by_a_task = web.run("twinectl", "task", "exec", other["task"], "--", *get)
        assert by_its_host.strip() == by_a_task.strip() != ""
    web.run("twinectl", "job", "stop", "own", "--wait")
