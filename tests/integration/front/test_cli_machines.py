"""`twinectl machine` against a front end: lists, plans, loans and imports."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from control_plane.api.health import ConfirmDown, HeldBack
from control_plane.api.machine_commands import MarkDown
from control_plane.api.routes import ROUTES
from control_plane.cli import main
from control_plane.client import ControlPlaneClient

from .conftest import Region

ROUTE = {route.name: route for route in ROUTES}

Ctl = Callable[..., Result]
LIST = """machine,region,datacenter,msb,row,rack,machine_type,generation,sku,rru,cpus,memory,cluster
m1,prn,prn1,msb1,row1,rack1,web,skylake,web-1s-64g,1.5,36,64G,c1
m2,prn,prn1,msb1,row1,rack2,web,skylake,web-1s-64g,1.5,36,64G,c1
m3,prn,prn2,msb2,row1,rack1,gpu,,,,,,c2
"""


@pytest.fixture
def ctl(region: Region) -> Ctl:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(
            main, arguments, env={"TWINE_ENDPOINT": f"unix:{region.socket}", "TZ": "UTC"}
        )

    return run


@pytest.fixture
def imported(ctl: Ctl, tmp_path: Path) -> Path:
    path = tmp_path / "machines.csv"
    path.write_text(LIST)
    result = ctl("machine", "import", str(path), "--simulated")
    assert result.stdout == "3 machine(s) added, 0 updated, 0 unchanged\n"
    return path


def names(result: Result) -> list[str]:
    assert result.exit_code == 0, result.stderr
    return [line.split()[0] for line in result.stdout.splitlines()[1:]]


@pytest.mark.behaviour("MO2")
@pytest.mark.usefixtures("imported")
def test_machines_are_listed_by_every_filter(ctl: Ctl) -> None:
    everything = ctl("machine", "list")
    assert names(everything) == ["m1", "m2", "m3"]
    assert everything.stderr == "3 machine(s): 3 up, 3 free, 0 in 0 entitlement(s)\n"
    assert names(ctl("machine", "list", "--datacenter", "prn1")) == ["m1", "m2"]
    assert names(ctl("machine", "list", "--msb", "msb2")) == ["m3"]
    assert names(ctl("machine", "list", "--rack", "rack1", "--type", "web")) == ["m1"]
    assert names(ctl("machine", "list", "--cluster", "c1", "--free")) == ["m1", "m2"]
    assert names(ctl("machine", "list", "--state", "down")) == []
    assert names(ctl("machine", "list", "--unavailable")) == []
    shown = json.loads(ctl("machine", "list", "--region", "prn", "-o", "json").stdout)
    assert [view["record"]["machine"] for view in shown["machines"]] == ["m1", "m2", "m3"]


@pytest.mark.usefixtures("imported")
def test_machines_are_listed_by_job_requirements(ctl: Ctl) -> None:
    def where(text: str) -> list[str]:
        return names(ctl("machine", "list", "--where", text))

    assert where("memory > 32GiB and rack != rack2") == ["m1"]
    assert where("generation not exists or rack = rack2") == ["m2", "m3"]
    assert where("state = up and not entitlement exists") == ["m1", "m2", "m3"]
    wrong = ctl("machine", "list", "--where", "memory > 64GB and colour = red")
    assert wrong.exit_code == 64
    assert "at character 10: '64GB' is not a size" in wrong.stderr
    assert "at character 19: 'colour' is not a property" in wrong.stderr


@pytest.mark.usefixtures("imported")
def test_labels_are_set_shown_queried_and_removed(ctl: Ctl, imported: Path) -> None:
    done = ctl("machine", "label", "m1", "m2", "--set", "disk=nvme", "--set", "zone=a")
    assert done.stdout.split() == ["MACHINE", "LABELS"] + [
        word for name in ("m1", "m2") for word in (name, "disk=nvme", "zone=a")
    ]
    ctl("machine", "label", "--scope", "where=rack = rack2", "--remove", "disk", "--set", "zone=b")
    assert names(ctl("machine", "list", "--where", "label.disk = nvme")) == ["m1"]
    assert names(ctl("machine", "list", "--where", "label.zone exists")) == ["m1", "m2"]
    assert "labels          disk=nvme zone=a" in ctl("machine", "show", "m1").stdout
    # a list without labels leaves them; one with labels sets all of them
    again = ctl("machine", "import", str(imported), "--simulated")
    assert again.stdout == "0 machine(s) added, 0 updated, 3 unchanged\n"
    imported.write_text(
        "machine,datacenter,msb,row,rack,machine_type,labels\nm9,prn1,b,w,r,web,disk=hdd n=3\n"
    )
    assert ctl("machine", "import", str(imported), "--simulated").exit_code == 0
    assert names(ctl("machine", "list", "--where", "label.n >= 3")) == ["m9"]
    for wrong, why in (
        (("--set", "disk"), "cannot use --set 'disk'"),
        (("--set", "Disk=x"), "1 to 63 of a-z"),
        (("--set", "a=b", "--remove", "a"), "'a' is both set and removed"),
        ((), "there is nothing to change"),
    ):
        refused = ctl("machine", "label", "m1", *wrong)
        assert refused.exit_code == 64, refused.stderr
        assert why in refused.stderr
    assert ctl("machine", "label", "m1", "m77", "--set", "a=b").exit_code == 3
    assert names(ctl("machine", "list", "--where", "label.a exists")) == []


@pytest.mark.behaviour("MO18")
@pytest.mark.usefixtures("imported")
def test_a_machine_is_shown_with_place_hardware_and_events(ctl: Ctl) -> None:
    drained = ctl(
        *("machine", "drain", "m1", "--reason", "new fan", "--start", "1h"),
        *("--deadline", "30m", "--duration", "2h"),
    )
    assert "maintenance" in drained.stdout
    shown = ctl("machine", "show", "m1").stdout
    assert "prn/prn1/msb1/row1/rack1/m1" in shown
    assert "skylake, SKU web-1s-64g, RRU 1.5, CPUs 36, memory 64GiB" in shown
    assert "maintenance: new fan; from 20" in shown
    assert "takes 2h" in shown
    assert "agent has not joined yet" in " ".join(shown.split())


@pytest.mark.behaviour("RB11", "HC14", "FE6")
@pytest.mark.usefixtures("imported")
def test_a_cluster_is_drained_undrained_and_removed(ctl: Ctl) -> None:
    drain = ("machine", "drain", "--scope", "cluster=c1", "--reason", "old")
    found = json.loads(ctl(*drain, "--kind", "decommission", "-o", "json").stdout)
    assert [record["machine"] for record in found["machines"]] == ["m1", "m2"]
    assert names(ctl("machine", "list", "--unavailable")) == ["m1", "m2"]
    assert names(ctl("machine", "undrain", "m2")) == ["m2"]
    refused = ctl("machine", "remove", "m2")
    assert refused.exit_code == 5
    assert "it is not being decommissioned or replaced" in refused.stderr
    assert ctl("machine", "remove", "m1").stdout == "machine m1: removed\n"
    assert names(ctl("machine", "list")) == ["m2", "m3"]


@pytest.mark.behaviour("EL1", "EL4")
@pytest.mark.usefixtures("imported")
def test_a_machine_is_lent_and_called_back(ctl: Ctl) -> None:
    assert ctl("machine", "lend", "m1", "--to", "batch").stdout == (
        "machine m1: lent to batch by the free pool\n"
    )
    assert "from the free pool since" in ctl("machine", "show", "m1").stdout
    again = ctl("machine", "lend", "m1", "--to", "other", "--from", "batch")
    assert (again.exit_code, "is already on loan" in again.stderr) == (5, True)
    assert "its loan to batch was revoked" in ctl("machine", "revoke", "m1").stdout


def test_a_wrong_list_is_refused_with_all_its_lines(ctl: Ctl, imported: Path) -> None:
    imported.write_text(LIST.replace("64G", "lots").replace("m3", "M3"))
    refused = ctl("machine", "import", str(imported))
    assert refused.exit_code == 64
    assert refused.stderr.splitlines()[0] == "error: cannot import the list, nothing was changed:"
    assert [line.split(":")[0].strip() for line in refused.stderr.splitlines()[1:]] == [
        "line 2",
        "line 3",
        "line 4",
    ]
    imported.write_text(LIST.replace("rack2", "rack3"))
    dry = ctl("machine", "import", str(imported), "--dry-run", "-o", "json")
    counts = {"added": 0, "updated": 1, "unchanged": 2}
    assert json.loads(dry.stdout) == {**counts, "dry_run": True, "pending": False}


@pytest.mark.behaviour("RB1", "RB4")
@pytest.mark.usefixtures("imported")
def test_a_subscriber_follows_a_broker_over_http(ctl: Ctl, region: Region) -> None:
    async def follow() -> list[str]:
        async with ControlPlaneClient(f"unix:{region.socket}") as client:
            brokers = (await client.list_brokers()).brokers
            assert [(b.datacenter, b.machines, b.free) for b in brokers] == [
                ("prn1", 2, 2),
                ("prn2", 1, 1),
            ]
            page = await client.broker_machines("prn1")
            assert [record.machine for record in page.machines] == ["m1", "m2"]
            waiting = asyncio.ensure_future(client.broker_changes("prn1", page.revision, 20.0))
            await asyncio.sleep(0)
            region.run(region.control_plane.brokers.carry_out("m2", MarkDown(reason="test")))
            news = await waiting
            assert (await client.broker_changes("prn1", 1)).lost
            return [change.name for change in news.changes]

    assert asyncio.run(follow()) == ["m2"]


@pytest.mark.behaviour("BUG-CP16", "BUG-CP23")
@pytest.mark.usefixtures("imported")
def test_machines_without_waiters_are_not_confirmed(ctl: Ctl, region: Region) -> None:
    """An operator's confirmation counts only where a component is silent."""
    assert json.loads(ctl("machine", "held-back", "-o", "json").stdout) == {"machines": []}
    for choice in (["m1"], ["--scope", "dc=prn1"]):
        refused = ctl("machine", "confirm-down", *choice, "--reason", "fire")
        assert refused.exit_code == 5
        assert "each of these machines answers, or is down" in refused.stderr
    assert ctl("machine", "confirm-down", "--reason", "fire").exit_code == 64
    assert ctl("machine", "confirm-down", "m1").exit_code == 64


@pytest.mark.behaviour("BUG-CP23", "BUG-UX138")
@pytest.mark.usefixtures("imported")
def test_held_back_changes_are_shown_and_confirmed(ctl: Ctl, region: Region) -> None:
    """The reason is shown, and the caller's name and reason are passed on."""
    messages: list[str] = []

    class Checker:
        held_count = 2

        def held_back(self) -> list[HeldBack]:
            held = HeldBack(machine="m1", state="up", silent_s=40.0, reason="looks cut", left_s=9.0)
            return [held]

        def confirm_down(self, machines: list[str], why: str) -> list[str]:
            messages.append(why)
            return list(machines)

    region.control_plane.health._checker = Checker()
    assert "looks cut" in ctl("machine", "held-back").stdout
    done = ctl("machine", "confirm-down", "--scope", "dc=prn1", "--reason", "fire")
    assert done.stdout == "2 machine(s) confirmed down: m1, m2\n"
    assert messages == [f"confirmed by local:{os.getuid()}: fire"]
    assert ctl("role", "grant", "user:sue", "operator").exit_code == 0
    request = ConfirmDown(machines=["m1"], reason="flood")

    async def as_sue() -> None:
        async with region.client("user", "sue") as client:
            await client.call(ROUTE["confirm_down"], request)

    asyncio.run(as_sue())
    assert messages[1:] == ["confirmed by sue: flood"]
