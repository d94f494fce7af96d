"""`twinectl profile` against a front end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agent.api import Location, ProfileStatus, SettingOutcome
from agent.api.joining import JoinRequest
from agent.api.profile import ProfileSwitch, SettingSwitch
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.profiles import version_name
from control_plane.cli import main

from .conftest import FACTS, Region

Ctl = Callable[..., Result]
TEXT = """description = "A longer queue"
extends = "web"
[sysctl]
"net.core.somaxconn" = 16384
"""


@pytest.fixture
def ctl(region: Region) -> Ctl:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(
            main, arguments, env={"TWINE_ENDPOINT": f"unix:{region.socket}", "TZ": "UTC"}
        )

    spec = EntitlementSpec(machines=1, host_profile="web")
    region.run(region.control_plane.portal.put("front", spec, jobs=[]))
    return run


def ok(result: Result) -> str:
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.behaviour("HP13")
def test_a_profile_is_proposed_shown_and_taken_back(ctl: Ctl, tmp_path: Path) -> None:
    file, name = tmp_path / "queue.toml", version_name("web", TEXT)
    file.write_text(TEXT)
    propose = ("profile", "propose", "front", str(file), "--reason", "bursts")
    assert ok(ctl(*propose, "--dry-run")) == "valid, nothing changed\n"
    assert json.loads(ok(ctl("profile", "status", "front", "-o", "json")))["rollout"] is None
    lines = ok(ctl(*propose, "--gate", "5m")).splitlines()
    assert lines[:2] == [
        "entitlement front: machines that join it run web",
        f"  web → {name}: rolling, bursts",
    ]
    found = json.loads(ok(ctl("profile", "status", "front", "-o", "json")))
    assert (found["rollout"]["gate_s"], found["text"]) == (300.0, TEXT)
    assert "back" in ok(ctl("profile", "rollback", "front"))


def test_an_unusable_profile_is_refused_with_every_reason(ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "queue.toml"
    file.write_text(TEXT.replace("net.core.somaxconn", "kernel.panic").replace("web", "base"))
    refused = ctl("profile", "propose", "front", str(file), "--reason", "x")
    assert refused.exit_code != 0
    assert "sysctl.kernel.panic: owners may not set it" in refused.stderr
    assert "extends: it must extend 'web'" in refused.stderr
    missing = ctl("profile", "propose", "front", str(tmp_path / "no"), "--reason", "x")
    assert "No such file" in missing.stderr
    assert ctl("profile", "status", "other").exit_code == 3


async def _reports(region: Region, machine: str, profile: ProfileStatus) -> None:
    """Add a machine that reports this profile."""
    request = JoinRequest(
        token="", machine=machine, csr_pem="", address="a:1", location=Location(), facts=FACTS
    )
    await region.control_plane.joined(request)
    region.control_plane.observations.listed(machine, FACTS, [], profile, [])


@pytest.mark.behaviour("HP4", "BUG-AU5")
def test_times_of_switches_are_a_table(ctl: Ctl, region: Region) -> None:
    head = ["SETTING", "SWITCHES", "P50", "P90"]
    assert ok(ctl("profile", "stats")).split() == head
    assert json.loads(ok(ctl("profile", "stats", "-o", "json"))) == {"machines": 0, "settings": []}
    for name, took_ms in (("vm1", 40.0), ("vm2", 90.0)):
        switched = ProfileSwitch(
            settings=[
                SettingSwitch(
                    setting="sysctl.vm.swappiness", outcome=SettingOutcome.APPLIED, took_ms=took_ms
                )
            ],
            took_ms=2 * took_ms,
        )
        region.run(_reports(region, name, ProfileStatus(switched=switched)))
    rows = [line.split() for line in ok(ctl("profile", "stats")).splitlines()]
    assert [row[:2] for row in rows] == [head[:2], ["sysctl", "2"], ["(whole", "switch)"]]
    found = json.loads(ok(ctl("profile", "stats", "-o", "json")))
    assert found["machines"] == 2
    assert [(x["setting"], x["switches"], x["p50_ms"], x["p90_ms"]) for x in found["settings"]] == [
        ("sysctl", 2, 40.0, 90.0),
        ("(whole switch)", 2, 80.0, 180.0),
    ]
