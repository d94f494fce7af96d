"""Well-known servers from Debian's packages as tasks, used by their own clients.

They run with the default hardening, as every task does; none needs a relaxation.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab.lab_client import Failed, LabClient
from vm_lab.image.programs import build_program

pytestmark = [pytest.mark.lab, pytest.mark.long]
JOB = """
name = "{name}"
entitlement = "demo"
tasks = 1
image = "{image}"
command = {command}
ports = ["main", "peer"]

[environment]
PORT = "${{port:main}}"

[limits]
memory_max_bytes = "300MiB"
tasks_max = 128

[probe]
kind = "tcp"
port = "main"
"""
ETCD = [
    "/usr/bin/start",
    "--listen-client-urls=http://0.0.0.0:${port:main}",
    "--advertise-client-urls=http://127.0.0.1:${port:main}",
    "--listen-peer-urls=http://127.0.0.1:${port:peer}",
    "--initial-advertise-peer-urls=http://127.0.0.1:${port:peer}",
    "--initial-cluster=etcd-0=http://127.0.0.1:${port:peer}",
]


@dataclass(frozen=True)
class Client:
    """Runs programs of an image against one of its tasks, in the lab's network."""

    lab: LabClient
    root: Path
    host: str
    port: int

    def run(self, *arguments: str) -> str:
        return self.lab.lab("exec", "--", "chroot", str(self.root), *arguments).strip()

    def sh(self, line: str) -> str:
        return self.run("/bin/sh", "-c", line)


def of_redis(c: Client) -> None:
    cli = ("redis-cli", "-h", c.host, "-p", str(c.port))
    assert c.run(*cli, "set", "colour", "blue") == "OK"
    assert c.run(*cli, "get", "colour") == "blue"
    assert "redis_version:" in c.run(*cli, "info", "server")


def of_memcached(c: Client) -> None:
    script = rf"printf 'set colour 0 0 4\r\nblue\r\nget colour\r\nquit\r\n' | nc {c.host} {c.port}"
    assert c.sh(script).split() == ["STORED", "VALUE", "colour", "0", "4", "blue", "END"]


def of_haproxy(c: Client) -> None:
    assert c.run("wget", "-q", "-O-", f"http://{c.host}:{c.port}/") == "haproxy of haproxy-0"


def of_etcd(c: Client) -> None:
    slow = ("--dial-timeout=120s", "--command-timeout=120s")
    ctl = ("etcdctl", f"--endpoints=http://{c.host}:{c.port}", *slow)
    assert c.run(*ctl, "put", "colour", "blue") == "OK"
    assert c.run(*ctl, "get", "--print-value-only", "colour") == "blue"


def of_postgresql(c: Client) -> None:
    psql = "/usr/lib/postgresql/17/bin/psql"
    at = (psql, "-h", c.host, "-p", str(c.port), "-U", "postgres", "-tA")
    made = "create table seen (at int); insert into seen select generate_series(1, 1000);"
    c.run(*at, "-c", made)
    assert c.run(*at, "-c", "select sum(at) from seen") == "500500"


USES = {
    "redis": of_redis,
    "memcached": of_memcached,
    "haproxy": of_haproxy,
    "etcd": of_etcd,
    "postgresql": of_postgresql,
}


@pytest.fixture
def unpacked(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path]:
    """A program's name, the tar of its image, and the folder where the image is unpacked."""
    tar = build_program(request.param, print)
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["tar", "-xf", tar, "-C", root], check=True)
    return request.param, tar, root


@pytest.mark.behaviour("AG1")
@pytest.mark.parametrize("unpacked", USES, indirect=True)
def test_a_program_of_debian_serves_its_own_client(
    the_lab: LabClient, entitlement: str, unpacked: tuple[str, Path, Path], tmp_path: Path
) -> None:
    """Real servers run under the default hardening."""
    name, tar, root = unpacked
    image = the_lab.ctl("image", "push", str(tar))["digest"]
    command = ETCD if name == "etcd" else ["/usr/bin/start"]
    file = tmp_path / f"{name}.toml"
    file.write_text(JOB.format(name=name, image=image, command=command))
    try:
        the_lab.run("twinectl", "job", "apply", str(file), "--wait", "--timeout", "600s")
    except Failed as e:
        pytest.fail(f"{e}\n{the_lab.run('twinectl', 'job', 'logs', name, '0')}")
    [endpoint] = endpoints(the_lab, name)
    USES[name](Client(the_lab, root, endpoint["host"], endpoint["ports"]["main"]))
    the_lab.run("twinectl", "job", "stop", name, "--wait")


def endpoints(lab: LabClient, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = lab.ctl("job", "endpoints", name)["endpoints"]
    return found
