"""Private networks and the firewall on a real kernel, in namespaces that end with the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("netd_script.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scratch = tmp_path_factory.mktemp("netd")
    run = scratch / "run"
    run.mkdir()
    inside = (
        f"mount -t tmpfs none /run && mkdir -p /run/twine {scratch}/cgroup"
        f" && exec {sys.executable} {SCRIPT} {scratch}/cgroup 100"
    )
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", inside],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.behaviour("AG8")
def test_a_private_task_is_reached_only_by_its_host_and_the_allowed_jobs(
    found: dict[str, Any],
) -> None:
    walls = found["walls"]
    assert (walls["host"], walls["db"]) == ("open", "open")
    assert (walls["other"], walls["other by IPv4"]) == ("silence", "silence")


@pytest.mark.behaviour("BUG-AG10", "AG8")
def test_a_private_task_reaches_neither_agent_nor_metadata(found: dict[str, Any]) -> None:
    walls = found["walls"]
    assert walls["agent"] not in ("open", "silence")
    assert walls["next to the agent"] == "open"
    assert (walls["metadata"], walls["metadata from the host"]) == ("silence", "open")


def test_the_kernel_has_the_requested_rate(found: dict[str, Any]) -> None:
    assert "tbf" in found["walls"]["rate"]
    assert "rate 8Mbit" in found["walls"]["rate"]


def test_a_private_task_may_bind_every_port_and_others_may_not(found: dict[str, Any]) -> None:
    """Images listen on 80 and 53; no task has CAP_NET_BIND_SERVICE, so bind failed with EACCES."""
    assert found["walls"]["low ports"] == ["0", "1024"]


@pytest.mark.behaviour("BUG-AG57", "BUG-AG58")
def test_a_task_uses_only_its_new_address_and_rate_after_a_change(
    found: dict[str, Any],
) -> None:
    """The firewall drops packets from the old address, which the kernel could still choose."""
    assert found["moved"] == {"reached": "open", "rate": False, "only": True}


def test_the_same_request_again_changes_nothing(found: dict[str, Any]) -> None:
    assert found["walls"]["same again"]


@pytest.mark.behaviour("F-27")
def test_nothing_is_left_after_a_hundred_networks(found: dict[str, Any]) -> None:  # P9
    assert found["cycles"] == {"networks": 0, "links": [], "files": [], "mounts": 0}


@pytest.mark.behaviour("F-27")
def test_only_links_and_files_without_a_task_are_removed_by_name(
    found: dict[str, Any],
) -> None:  # P9
    unknown = found["unknown"]
    assert (unknown["links"], unknown["files"]) == (["e0"], [])
    assert "e0 is not a link of a task" in unknown["refused"]


def test_a_host_without_a_default_route_knows_its_own_address(found: dict[str, Any]) -> None:
    """For instance a host of the lab.

    The query avoids netlink, which the agent's sandbox blocks.
    """
    assert found["own"] == "10.77.0.11"
