"""Private tasks of two hosts, on real kernels (docs/network.md)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import pytest

from tests.lab.images import busybox_image
from tests.lab.one_guest import OneGuest

START = "twine-agent run {} --image /root/image.tar --memory 16M --network private {} -- /bin/sh -c"
SERVE = "echo hello >/tmp/index.html; exec busybox httpd -f -p 8080 -h /tmp"

LINKS = 'test -z "$(ls /run/twine/netns)" && ls /sys/class/net | grep ^tw || true'
"""The links of tasks, printed once no namespace is left."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[OneGuest]:
    found = OneGuest(name="two", count=2)
    found.up()
    for machine in ("m1", "m2"):
        found.put("/root/image.tar", busybox_image(), machine)
        found.ssh("systemctl start twine-agent.service", timeout_s=900, machine=machine)
    yield found
    found.down()


@pytest.mark.behaviour("AG8", "BUG-NT1")
@pytest.mark.long
def test_private_tasks_of_two_hosts_connect_only_if_allowed_and_leave_nothing(
    hosts: OneGuest,
) -> None:
    """Tasks use their own IPv6 addresses (BUG-NT1); the agents' ports are closed to them."""
    start = START.format("served", "--allow-from listed --port 8080")
    hosts.ssh(f"{start} {shlex.quote(SERVE)}")
    shown = json.loads(hosts.ssh("twine-agent show served -o json"))["task"]
    assert shown["health"] == "healthy"
    url = f"http://[{shown['addresses'][0]}]:8080/index.html"
    for name in ("listed", "unlisted"):
        start = START.format(name, "")
        hosts.ssh(f"{start} 'exec busybox sleep 100000'", machine="m2")

    def answer_to(name: str, of: str) -> str:
        inside = f"nsenter --net=/run/twine/netns/{name} curl -sk --max-time 20 {of}"
        return hosts.ssh(f"{inside} || echo failed", machine="m2").strip()

    hosts.until("the listed task gets an answer", lambda: answer_to("listed", url) == "hello")
    assert answer_to("unlisted", url) == "failed"
    assert answer_to("listed", url) == "hello"
    for agent in ("10.77.0.11", "10.77.0.12"):
        assert answer_to("listed", f"https://{agent}:7443/") == "failed"
    assert answer_to("listed", "http://169.254.169.254/") == "failed"
    for machine, names in (("m1", ("served",)), ("m2", ("listed", "unlisted"))):
        for name in names:
            hosts.ssh(f"twine-agent stop {name}", machine=machine)
        hosts.until(
            f"nothing is left on {machine}",
            lambda at=machine: hosts.ssh(LINKS, machine=at).split() == ["twine6"],
        )
