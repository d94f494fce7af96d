"""`twinectl entitlement` and `capacity` against the real portal behind a front end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from agent.api import Location
from agent.api.joining import JoinRequest
from control_plane.api.settings import Approval
from control_plane.cli import main
from control_plane.identity.authority import CertificateSubject
from wire import tls

from .conftest import FACTS, Region

Ctl = Callable[..., Result]


@pytest.fixture
def ctl(region: Region) -> Ctl:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments, env={"TWINE_ENDPOINT": f"unix:{region.socket}"})

    return run


@pytest.fixture
def machines(region: Region) -> None:
    for i in range(4):
        region.run(
            region.control_plane.joined(
                JoinRequest(
                    token="",
                    machine=f"vm{i}",
                    csr_pem="",
                    address="a:1",
                    location=Location(datacenter=f"dc{i % 2}"),
                    facts=FACTS,
                )
            )
        )


def as_user(region: Region, name: str, folder: Path) -> Ctl:
    file = folder / f"{name}.json"
    tls.save(
        region.authority.credential(CertificateSubject("user", name), region.url, 3600.0), file
    )

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(
            main, ("--credential", str(file), *arguments), env={"TWINE_ENDPOINT": ""}
        )

    return run


def spec_of(ctl: Ctl, name: str) -> dict[str, Any]:
    found = json.loads(ctl("entitlement", "show", name, "-o", "json").stdout)
    return found["record"]["spec"]


@pytest.mark.behaviour("CP1")
@pytest.mark.usefixtures("machines")
def test_an_entitlement_is_created_grown_shown_shrunk_and_deleted(ctl: Ctl) -> None:
    made = ctl("entitlement", "create", "front", "--machines", "2", "--business-unit", "ads/rank")
    assert made.stdout == "entitlement front: up to 2 machines, profile base\n"
    grown = ctl("entitlement", "update", "front", "--machines", "4")
    assert grown.stdout == "entitlement front: up to 4 machines, profile base\n"
    assert spec_of(ctl, "front")["business_unit"] == "ads/rank"
    assert ctl("entitlement", "update", "front", "--machines", "1").exit_code == 0
    shown = ctl("entitlement", "show", "front").stdout
    assert "ads/rank" in shown
    assert "1 machines" in shown
    assert ctl("entitlement", "delete", "front").stdout == "entitlement front: removed\n"
    assert ctl("entitlement", "show", "front").exit_code == 3


@pytest.mark.behaviour("CP1")
@pytest.mark.usefixtures("machines")
def test_a_request_over_the_capacity_is_refused_with_the_sum(ctl: Ctl) -> None:
    ctl("entitlement", "create", "front", "--machines", "3")
    result = ctl("entitlement", "create", "back", "--machines", "2", "--datacenter", "dc1")
    assert result.exit_code == 5
    assert result.stderr.splitlines() == [
        "error: cannot grant entitlement 'back' its quota: the whole region: 3 machines granted"
        " to others + 2 machines asked > 4 machines",
        "try:   1 machines of these could be granted",
    ]


@pytest.mark.usefixtures("machines")
def test_all_errors_are_reported_at_once(ctl: Ctl, tmp_path: Path) -> None:
    result = ctl("entitlement", "create", "front", "--quota", "x=1", "--datacenter", "dc7")
    assert result.exit_code == 64
    assert "per_type: the region has no machines of type x; it has: small" in result.stderr
    assert "datacenter: the region has no data center dc7; it has: dc0, dc1" in result.stderr
    file = tmp_path / "e.toml"
    file.write_text('business_unit = "/"\nprioriti = 1\n')
    result = ctl("entitlement", "create", "front", "--file", str(file))
    assert result.exit_code == 64
    for field in ("machines", "business_unit", "prioriti"):
        assert f"  {field}: " in result.stderr


def test_all_fields_come_from_a_file_and_options_are_put_over_it(ctl: Ctl, tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(
        """
per_type = {skylake = 2000, milan = 10}
datacenter = "dc1"
priority = 900
business_unit = "ads/ranking"
preferences = [{property = "msb", strategy = "pack"}]
overcommit = {cpu = 1.5}
"""
    )
    made = ctl("entitlement", "create", "front", "--file", str(file), "--quota", "skylake=7")
    assert made.stdout == "entitlement front: up to 7 skylake, profile base\n"
    spec = spec_of(ctl, "front")
    assert (spec["per_type"], spec["datacenter"], spec["priority"]) == ({"skylake": 7}, "dc1", 900)
    assert spec["overcommit"]["cpu"] == 1.5
    changed = ctl("entitlement", "update", "front", "--unset", "datacenter", "--priority", "1")
    assert changed.exit_code == 0
    assert spec_of(ctl, "front")["datacenter"] is None


@pytest.mark.behaviour("BUG-UX102")
def test_an_entitlement_is_changed_by_all_options_or_not_at_all(ctl: Ctl, machines: None) -> None:
    """Regression: a wrong `--unset` and the first of two quotas of one type were dropped."""
    assert ctl("entitlement", "create", "front", "--machines", "2").exit_code == 0
    before = spec_of(ctl, "front")
    for options, words in (
        (("--unset", "prority", "--machines", "1"), "there is no such property"),
        (("--unset", "priority", "--priority", "7"), "cannot be given with a value of priority"),
        (("--unset", "owners", "--add-owner", "bob"), "cannot be given with a value of owners"),
        (("--quota", "skylake=1", "--quota", "skylake=2"), "--quota skylake=… is given 2 times"),
    ):
        refused = ctl("entitlement", "update", "front", *options)
        assert refused.exit_code == 64, refused.output
        assert words in refused.output
    assert spec_of(ctl, "front") == before


@pytest.mark.behaviour("BUG-UX116")
def test_an_owner_both_added_and_removed_is_refused(ctl: Ctl) -> None:
    """Regression: `--add-owner X --remove-owner X` changed nothing, or removed X, and reported
    success.
    """
    assert ctl("entitlement", "create", "front", "--machines", "2").exit_code == 0
    before = spec_of(ctl, "front")
    for option in ("--add-owner", "--owner"):
        refused = ctl("entitlement", "update", "front", option, "bob", "--remove-owner", "user:bob")
        assert refused.exit_code == 64, refused.output
        assert f"{option} and --remove-owner are both given for user:bob" in refused.output
    assert spec_of(ctl, "front") == before


@pytest.mark.behaviour("CP6", "CP12")
def test_requests_are_decided_by_authorized_users(region: Region, ctl: Ctl, tmp_path: Path) -> None:
    portal = region.control_plane.portal
    portal.settings = msgspec.structs.replace(portal.settings, approval=Approval.ALWAYS)
    ann, bob = as_user(region, "ann", tmp_path), as_user(region, "bob", tmp_path)
    created = ann("entitlement", "create", "front", "--machines", "5", "--reason", "launch")
    assert created.exit_code == 0, created.output
    assert created.stdout == (
        "entitlement front: request r1 waits: approval is required for more capacity\n"
    )
    shown = ann("entitlement", "show", "front")
    assert shown.exit_code == 3
    assert "r1 waits for approval" in shown.stderr
    listed = ann("entitlement", "requests").stdout
    assert "launch" in listed
    assert "ann" in listed
    assert ann("entitlement", "approve", "r1").exit_code == 77
    assert bob("entitlement", "withdraw", "r1").exit_code == 77
    assert bob("entitlement", "approve", "r1", "--note", "fine").stdout == (
        "entitlement front: up to 5 machines, profile base\n"
    )
    assert ann("entitlement", "update", "front", "--machines", "9").exit_code == 0
    denied = ctl("entitlement", "deny", "r2", "--note", "no budget")
    assert denied.stdout == "entitlement front: request r2 is denied\n"
    assert spec_of(ctl, "front")["machines"] == 5
    assert ctl("entitlement", "approve", "r2").exit_code == 5
    assert ctl("entitlement", "approve", "r99").exit_code == 3
    every = json.loads(ctl("entitlement", "requests", "--all", "-o", "json").stdout)["requests"]
    assert [(r["request_id"], r["state"], r["decided_by"]) for r in every] == [
        ("r1", "approved", "bob"),
        ("r2", "denied", every[1]["decided_by"]),
    ]
    assert every[1]["decided_by"].startswith("local:")
    assert ann("entitlement", "request", "front", "--delete").exit_code == 0
    assert "(remove)" in ann("entitlement", "requests").stdout
    assert ann("entitlement", "withdraw", "r3").stdout.endswith("is withdrawn\n")


@pytest.mark.behaviour("MO13", "CP8", "CP11", "AL22")
@pytest.mark.usefixtures("machines")
def test_a_capacity_report_has_a_table_for_each_question(ctl: Ctl) -> None:
    ctl("entitlement", "create", "front", "--machines", "3", "--business-unit", "ads/rank")
    whole = ctl("capacity", "report")
    assert whole.exit_code == 0, whole.output
    for words in ("guaranteed", "opportunistic: unused quota", "stranded RRU", "largest task on"):
        assert words in whole.stdout
    by_unit = ctl("capacity", "report", "--by", "unit").stdout.splitlines()
    units = [line.split()[:2] for line in by_unit]
    assert ["(all)", "3"] in units
    assert ["ads/rank", "3"] in units
    for by, name in (("entitlement", "front"), ("type", "small"), ("msb", "dc0/msb1")):
        assert name in ctl("capacity", "report", "--by", by).stdout
    assert "LIMIT W" in ctl("capacity", "report", "--by", "power").stdout  # no place has a budget
    assert "KW HELD/ALL" in ctl("capacity", "report", "--by", "datacenter").stdout
    split = json.loads(ctl("capacity", "report", "-o", "json").stdout)["split"]
    assert (split["unused_quota"]["machines"], split["buffer"]["machines"]) == (3, 1)


@pytest.mark.behaviour("EL7", "EL9", "EL10")
@pytest.mark.usefixtures("machines")
def test_loans_and_spare_machines_have_tables(ctl: Ctl, region: Region, tmp_path: Path) -> None:
    ctl("entitlement", "create", "front", "--machines", "3")
    file = tmp_path / "batch.toml"
    file.write_text("machines = 0\n[elastic]\nborrow = 2\nnotice = '5m'\n")
    made = ctl("entitlement", "create", "batch", "--file", str(file))
    assert made.exit_code == 0, made.output
    lent = ctl("machine", "lend", "vm2", "--to", "batch")
    assert lent.exit_code == 0, lent.stderr
    shown = ctl("capacity", "elastic")
    assert shown.exit_code == 0, shown.output
    assert "mode off: 1 machines on loan" in shown.stdout
    loans = ctl("capacity", "elastic", "--loans").stdout.splitlines()
    assert loans[1].split()[:4] == ["vm2", "(free", "pool)", "batch"]
    assert ctl("capacity", "signal", "batch").exit_code == 75, "no round of the lender has ended"
    region.run(region.control_plane.elastic._lender._round())
    signal = json.loads(ctl("capacity", "signal", "batch", "-o", "json").stdout)
    assert (signal["state"], signal["machines"]) == ("full", 1)
    assert "STATE" in ctl("capacity", "signal", "batch").stdout.upper()
    missing = ctl("capacity", "signal", "unknown")
    assert missing.exit_code == 3
    spare = ctl("capacity", "buffers")
    assert spare.exit_code == 0, spare.output
    assert "fault" in spare.stdout


def test_a_quota_of_zero_is_only_for_entitlements_that_borrow(ctl: Ctl) -> None:
    refused = ctl("entitlement", "create", "batch", "--machines", "0")
    assert refused.exit_code != 0
    assert "elastic.borrow" in refused.stderr
