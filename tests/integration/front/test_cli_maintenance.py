"""`twinectl maintenance` with a front end: previews, plans, and permissions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from control_plane.api.people import AuditPage
from control_plane.api.routes import ROUTES
from control_plane.cli import main

from .conftest import Region

Ctl = Callable[..., Result]
HEAD = "machine,region,datacenter,msb,row,rack,machine_type"
LIST = [f"m{n},prn,prn1,msb{n % 2},row1,rack{n},web" for n in range(8)]
KERNEL = ("--work", "kernel", "--reason", "6.12.9", "--deadline", "30m", "--duration", "10m")
ROUTE = {route.name: route for route in ROUTES}


@pytest.fixture
def ctl(region: Region, tmp_path: Path) -> Ctl:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(
            main, arguments, env={"TWINE_ENDPOINT": f"unix:{region.socket}", "TZ": "UTC"}
        )

    path = tmp_path / "machines.csv"
    path.write_text("\n".join([HEAD, *LIST]) + "\n")
    assert run("machine", "import", str(path), "--simulated").exit_code == 0
    return run


def ok(result: Result) -> str:
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.behaviour("HC4")
def test_work_is_judged_announced_shown_and_called_off(ctl: Ctl) -> None:
    """Covers scope, kind, start, deadline and duration, and a preview of the effects."""
    scope = ("--scope", "msb=msb1", "--wave-size", "2", "--within", "rack")
    plan = json.loads(ok(ctl("maintenance", "plan", "k1", *KERNEL, *scope, "-o", "json")))
    assert (plan["machines"], plan["waves"], plan["ends"]) == (4, [1, 1, 1, 1], "reboot")
    assert (plan["at_once"], plan["warnings"], plan["conflicts"]) == (1, [], [])
    assert ok(ctl("maintenance", "list")).splitlines()[1:] == []  # nothing was announced
    lines = ok(ctl("maintenance", "plan", "k1", *KERNEL, *scope)).splitlines()
    assert lines[0] == (
        "4 machine(s) in 4 wave(s) of at most 1, 0 task(s) there; work is over by reboot"
    )
    shown = ok(ctl("maintenance", "apply", "k1", *KERNEL, *scope)).splitlines()
    assert shown[0] == "plan k1: kernel, running, 0/4 done"
    assert shown[2].split()[:3] == ["1", "announced", "0/1"]
    assert shown[2].endswith("m1")  # nothing runs there: work may begin
    assert "kernel: 6.12.9" in ok(ctl("machine", "show", "m1"))
    (line,) = ok(ctl("maintenance", "list")).splitlines()[1:]
    assert line.split()[:5] == ["k1", "kernel", "running", "0/4", "1/4"]
    ok(ctl("maintenance", "done", "k1", "m1"))
    view = json.loads(ok(ctl("maintenance", "show", "k1", "-o", "json")))
    assert [wave["state"] for wave in view["waves"][:1]] == ["announced"]
    assert ok(ctl("maintenance", "cancel", "k1")).startswith("plan k1: kernel, cancelled")
    assert ", ended " in ok(ctl("machine", "show", "m1"))


@pytest.mark.behaviour("HC4")
def test_a_plan_over_the_limit_needs_an_override(ctl: Ctl, region: Region) -> None:
    """The audit log has the override."""
    whole = ("--scope", "datacenter=prn1")
    assert "WARNING: a wave takes 100% of the region's machines at once" in ok(
        ctl("maintenance", "plan", "all", *KERNEL, *whole)
    )
    refused = ctl("maintenance", "apply", "all", *KERNEL, *whole)
    assert refused.exit_code == 5
    assert "apply it with --despite" in refused.stderr
    ok(ctl("maintenance", "apply", "all", *KERNEL, *whole, "--despite"))

    async def audit() -> AuditPage:
        async with region.client() as client:
            return await client.call(ROUTE["list_audit"])

    entries = [e for e in asyncio.run(audit()).entries if e.object == "maintenance-plan/all"]
    assert [e.outcome for e in entries] == ["done", "failed"]  # the newest first
    assert "despite" in entries[0].detail


def test_invalid_maintenance_requests_are_refused_with_a_hint(ctl: Ctl) -> None:
    nothing = ctl("maintenance", "plan", "k1", *KERNEL)
    assert (nothing.exit_code, "name machines" in nothing.stderr) == (64, True)
    unknown = ctl("maintenance", "apply", "k1", "m99", *KERNEL)
    assert (unknown.exit_code, "there is no machine 'm99'" in unknown.stderr) == (3, True)
    missing = ctl("maintenance", "show", "k9")
    assert (missing.exit_code, "no maintenance plan 'k9'" in missing.stderr) == (3, True)
    named = ctl("maintenance", "apply", "K_1", "m1", *KERNEL)
    assert named.exit_code == 64
