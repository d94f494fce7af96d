"""Makes real private networks in its own network and mount namespaces; prints findings.

test_private_network.py runs it as a process, because a process cannot return from these namespaces.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from pyroute2 import netns

from agent.api import Network, NetworkMode, TaskSpec
from agent.machine import nft
from agent.machine.private_network import HostNetwork
from agent.netd import answer
from agent.netplan import NetRequest, Site, TaskNet
from agent.network.core.addresses import netns_of, plan
from wire.errors import HostError

SITE = Site(prefix6="fd74:7769::/32", host4="10.77.0.11", prefix4="100.64.0.0/10", agent_port=7443)
TIMEOUT_S = 1.0
"""How long to wait for a packet that must be dropped; accepted packets get a longer wait."""


def a_spec(**network: Any) -> TaskSpec:
    network = Network(mode=NetworkMode.PRIVATE, **network)
    return TaskSpec(image="sha256:" + "1" * 64, command=["x"], network=network)


def within(task: str, do: Callable[[], Any]) -> Any:
    """Return the result of a function that runs inside a task's network."""
    found: list[Any] = []

    def run() -> None:
        netns.setns(netns_of(task))
        found.append(do())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def listener(family: int, address: str, port: int) -> socket.socket:
    return socket.create_server((address, port), family=socket.AddressFamily(family))


def reaches(address: str, port: int, timeout_s: float) -> str:
    try:
        socket.create_connection((address, port), timeout_s).close()
    except TimeoutError:
        return "silence"
    except OSError as e:
        return e.strerror or str(e)
    return "open"


async def made(specs: dict[str, TaskSpec]) -> list[TaskNet]:
    nets: list[TaskNet] = []
    for task, spec in specs.items():
        nets.append(plan(SITE, task, spec, nets))
        await answer(NetRequest(site=SITE, ensure=nets[-1], allowed=nets))
    return nets


def _first_free_port() -> str:
    """Return the first port that needs no privilege, in the network of the calling thread."""
    return Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text().strip()


async def walls() -> dict[str, Any]:
    specs = {"web": a_spec(allow_from=["db"]), "db": a_spec(egress_mbps=8), "other": a_spec()}
    nets = await made(specs)
    again = await made(specs)
    web = nets[0].address6
    server = within("web", lambda: listener(socket.AF_INET6, web, 80))
    agent = listener(socket.AF_INET, "0.0.0.0", 7443)
    other_port = listener(socket.AF_INET, "0.0.0.0", 7444)
    metadata = listener(socket.AF_INET, "169.254.169.254", 80)
    found = {
        "host": reaches(web, 80, 60),
        "db": within("db", lambda: reaches(web, 80, 60)),
        "other": within("other", lambda: reaches(web, 80, TIMEOUT_S)),
        "other by IPv4": within("other", lambda: reaches(nets[0].address4, 80, TIMEOUT_S)),
        "agent": within("db", lambda: reaches("10.77.0.11", 7443, 60)),
        "next to the agent": within("db", lambda: reaches("10.77.0.11", 7444, 60)),
        "metadata": within("db", lambda: reaches("169.254.169.254", 80, TIMEOUT_S)),
        "metadata from the host": reaches("169.254.169.254", 80, 60),
        "same again": again == nets,
        "rate": _qdiscs("db"),
        "low ports": (within("web", _first_free_port), _first_free_port()),
    }
    for s in (server, agent, other_port, metadata):
        s.close()
    return found


def _addresses(task: str) -> list[str]:
    command = ["nsenter", f"--net={netns_of(task)}", "ip", "-o", "addr", "show", "dev", "eth0"]
    shown = subprocess.run(
        [*command, "scope", "global"], capture_output=True, text=True, check=True
    )
    return sorted(line.split()[3].partition("/")[0] for line in shown.stdout.splitlines())


async def another_host_address() -> dict[str, Any]:
    """The networks of two tasks are made again after the address of the host has changed."""
    site = replace(SITE, host4="10.77.0.12")
    specs = {"web": a_spec(allow_from=["db"]), "db": a_spec()}
    nets: list[TaskNet] = []
    for task, spec in specs.items():
        nets.append(plan(site, task, spec, (await answer(NetRequest(site=site))).networks))
        await answer(NetRequest(site=site, ensure=nets[-1], allowed=nets))
    server = within("web", lambda: listener(socket.AF_INET6, nets[0].address6, 80))
    found = {
        "reached": within("db", lambda: reaches(nets[0].address6, 80, TIMEOUT_S)),
        "rate": "tbf" in _qdiscs("db"),
        "only": _addresses("web") == sorted([nets[0].address4, nets[0].address6]),
    }
    server.close()
    return found


async def cycles(count: int) -> dict[str, Any]:
    left = await answer(NetRequest(site=SITE, remove=["web", "db", "other"], allowed=[]))
    before = _links()
    for turn in range(count):
        net = plan(SITE, f"t{turn}", a_spec(), [])
        there = await answer(NetRequest(site=SITE, ensure=net))
        assert [n.task_id for n in there.networks] == [f"t{turn}"], there
        left = await answer(NetRequest(site=SITE, remove=[f"t{turn}"]))
    return {
        "networks": len(left.networks),
        "links": sorted(set(_links()) ^ set(before)),
        "files": [p.name for p in Path(netns_of("x")).parent.iterdir()],
        "mounts": Path("/proc/self/mounts").read_text().count("netns/t"),
    }


def _make_unknown_devices() -> None:
    netns.create(netns_of("unknown"))
    words = "ip link add tw0123456789a type veth peer name q1"
    subprocess.run(words.split(), check=True)


async def remove_unknown() -> dict[str, Any]:
    """Objects without a task are removed by name, and nothing else is."""
    _make_unknown_devices()
    await answer(NetRequest(site=SITE, remove=["unknown"], unlink=["tw0123456789a"]))
    try:
        await answer(NetRequest(site=SITE, unlink=["e0"]))
    except HostError as e:
        refused = str(e)
    return {
        "links": [name for name in _links() if name.startswith(("tw0", "q1", "e0"))],
        "files": [p.name for p in Path(netns_of("x")).parent.iterdir()],
        "refused": refused,
    }


def _qdiscs(task: str) -> str:
    command = ["nsenter", f"--net={netns_of(task)}", "tc", "qdisc", "show", "dev", "eth0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def _rest(count: int) -> dict[str, Any]:
    moved = await another_host_address()
    return {"moved": moved, "cycles": await cycles(count), "unknown": await remove_unknown()}


def _links() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def main(scratch: str, count: int) -> None:
    nft.CGROUPS = scratch
    (Path(scratch) / SITE.tasks_group).mkdir()
    for words in (
        "link set lo up",
        "link add name e0 type veth peer name e1",
        "addr add 10.77.0.11/24 dev e0",
        "addr add 169.254.169.254/32 dev lo",
        "link set e0 up",
        "link set e1 up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    found = asyncio.run(walls())
    # This process's /sys still shows the links of the original namespace.
    subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=True)
    own = HostNetwork().address()
    print(json.dumps({"own": own, "walls": found, **asyncio.run(_rest(count))}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
