"""Generated regions have the shape of the published ones."""

import csv
import io
import json
from collections import Counter, defaultdict

import pytest
from msgspec.structs import replace

from control_plane.broker.core.inventory import COLUMNS, parse_csv, parse_json
from control_plane.portal.core.report import NOTHING, PortalReport, Used
from tests.generated_jobs import (
    assigned,
    make_entitlements,
    make_jobs,
    off_peak,
    service_of,
)
from vm_lab.region.generator import columns, main, make_racks, make_region, make_regions


@pytest.fixture(scope="module")
def region():
    return list(make_region(60_000))


def below(region, upper, lower):
    """Return for each place of an upper level how many places of a lower level it has, sorted."""
    found = defaultdict(set)
    for machine in region:
        found[getattr(machine.location, upper)].add(getattr(machine.location, lower))
    return sorted(map(len, found.values()))


@pytest.mark.behaviour("MO2", "MO3", "MO4")
def test_a_region_has_six_levels_in_the_sizes_of_the_paper(region):
    """Region PRN, buildings PRN1 to PRN5, 12 MSBs each, tens of rows and racks."""
    assert len({m.machine for m in region}) == len(region) == 60_000
    assert {m.location.region for m in region} == {"prn"}
    assert {m.location.datacenter for m in region} == {f"prn{n}" for n in range(1, 6)}
    assert below(region, "datacenter", "msb") == [12] * 5
    msbs = Counter(m.location.msb for m in region)
    assert len(msbs) == 60
    assert max(msbs.values()) < 1.5 * min(msbs.values())
    full = list(make_racks(1_000_000))
    rows = Counter(rack.location.row for rack in full)
    assert sum(rack.size for rack in full) == 1_000_000
    assert max(rows.values()) == 24  # racks of a row
    assert 17 < len(rows) / 60 < 23  # rows of an MSB
    assert len({rack.location.rack for rack in full}) == len(full)
    assert max(rack.size for rack in full) == 36


@pytest.mark.behaviour("MO5", "MO6")
def test_a_region_has_several_hardware_types_and_each_rack_has_one(region):
    """Types have RRU, memory, GPUs, network and power."""
    types = Counter(m.machine_type for m in region)
    assert len(types) == 11
    assert types["web-skylake"] / len(region) > 0.2
    assert 0.005 < sum(types[t] for t in types if t.startswith("training")) / len(region) < 0.03
    assert set(below_rack(region).values()) == {1}
    hardware = {m.machine_type: m.hardware for m in region}
    assert len({id(m.hardware) for m in region}) == 11  # machines of a type share one object
    assert len({id(m.location) for m in region}) == len({m.location.rack for m in region})
    for made in hardware.values():
        assert min(made.rru, made.cpus, made.memory_bytes, made.network_mbps, made.power_w) > 0
        assert made.generation
        assert made.sku
    assert hardware["training-ampere"].gpu_type == "a100"
    ages = defaultdict(Counter)
    for m in region:
        ages[m.location.datacenter][m.hardware.generation] += 1
    assert ages["prn1"]["milan"] == 0 < ages["prn5"]["milan"]  # the newest building
    assert ages["prn5"]["broadwell"] < ages["prn1"]["broadwell"]


def below_rack(region):
    found = defaultdict(set)
    for machine in region:
        found[machine.location.rack].add(machine.machine_type)
    return {rack: len(types) for rack, types in found.items()}


def test_the_same_seed_makes_the_same_region():
    assert list(make_region(500, seed=7)) == list(make_region(500, seed=7))
    assert list(make_region(500, seed=7)) != list(make_region(500, seed=8))


@pytest.mark.parametrize("machines", [0, 1, 59, 1000])
def test_a_small_region_has_all_its_machines(machines):
    assert len(list(make_region(machines))) == machines


@pytest.mark.behaviour("MO19")
def test_there_can_be_many_regions():
    """The generator can make more than 20 of them."""
    machines = list(make_regions(26, 5000))
    assert len({m.location.region for m in machines}) == 26
    assert len({m.machine for m in machines}) == 5000
    assert len({(m.location.region, m.location.msb) for m in machines}) == len(
        {m.location.msb for m in machines}
    )


@pytest.mark.behaviour("EX6", "EX7")
def test_entitlements_are_as_skewed_as_the_published_ones():
    """They match the CDF points of Figures 9 and 22."""
    made = make_entitlements(3000, 700_000)
    sizes = [e.spec.machines for e in made]
    assert len({e.name for e in made}) == len(made) == 3000
    assert sum(sizes) == 700_000
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= 1
    assert 15_000 <= sizes[0] <= 60_000
    assert sum(sizes[:50]) / sum(sizes) == pytest.approx(0.69, abs=0.02)
    assert sum(sizes[:54]) / sum(sizes) == pytest.approx(0.70, abs=0.01)
    assert len({service_of(e).name for e in made}) == 7
    assert {len(e.spec.machine_types) > 1 for e in made} == {True, False}


def test_machines_are_assigned_as_entitlements_are_owed(region):
    made = make_entitlements(200, 42_000)
    machines = list(assigned(region, make_racks(60_000), made))
    held = Counter(m.entitlement for m in machines)
    by_name = {e.name: e.spec for e in made}
    assert [replace(m, entitlement="", assignment_generation=0) for m in machines] == region
    assert 17_000 < held.pop("") < 25_000
    assert all(count <= by_name[name].machines for name, count in held.items())
    full = sum(held[e.name] == e.spec.machines for e in made)
    assert full / len(made) > 0.8
    assert all(m.machine_type in by_name[m.entitlement].machine_types
               for m in machines if m.entitlement)  # fmt: skip
    largest = {m.location.msb for m in machines if m.entitlement == made[0].name}
    assert len(largest) == 60


@pytest.mark.behaviour("AL15")
def test_jobs_have_36_tasks_in_the_mean_and_15000_at_most():
    """These are the figures of the paper's §6.1."""
    made = make_entitlements(3000, 700_000)
    jobs = make_jobs(made)
    tasks = [job.tasks for job in jobs]
    assert len({job.name for job in jobs}) == len(jobs) > 10_000
    assert max(tasks) == 15_000
    assert min(tasks) == 1
    assert sum(tasks) / len(tasks) == pytest.approx(36, rel=0.05)
    assert len({job.entitlement for job in jobs}) > 1500
    assert make_jobs(made)[:5] == jobs[:5]


def test_a_task_fits_on_every_machine_of_its_entitlement(region):
    made = make_entitlements(300, 42_000)
    smallest: dict[str, tuple[float, int, float, int]] = {}
    hardware = {m.machine_type: m.hardware for m in region}
    for entitlement in made:
        kinds = [hardware[kind] for kind in entitlement.spec.machine_types]
        smallest[entitlement.name] = tuple(
            min(getattr(kind, part) for kind in kinds)
            for part in ("cpus", "memory_bytes", "rru", "gpus")
        )
    for job in make_jobs(made):
        needs = (job.cpus, job.memory_bytes, job.rru, job.gpus)
        assert all(need <= has for need, has in zip(needs, smallest[job.entitlement], strict=True))
        assert min(needs[:3]) > 0


@pytest.mark.parametrize(("form", "parse"), [("--csv", parse_csv), ("--json", parse_json)])
def test_the_printed_list_can_be_imported(form, parse, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["generator", "--machines", "150", form])
    main()
    text = capsys.readouterr().out
    inventory = parse(text)
    assert inventory.errors == ()
    made = list(make_region(150))
    assert [(m.machine, m.location, m.machine_type, m.hardware) for m in inventory.machines] == [
        (m.machine, m.location, m.machine_type, m.hardware) for m in made
    ]
    names = json.loads(text)[0] if form == "--json" else next(csv.reader(io.StringIO(text)))
    assert tuple(names) == COLUMNS == tuple(columns(made[0]))


@pytest.mark.behaviour("CP11")
def test_off_peak_55_percent_is_guaranteed_and_45_opportunistic() -> None:
    """The paper's split, with all of its sources, in the report of a generated region."""
    total = 6000
    entitlements = make_entitlements(300, round(total * 0.7))
    machines = assigned(make_region(total), make_racks(total), entitlements)
    report = PortalReport(0.0)
    for record, has_tasks in off_peak(machines, entitlements):
        report.add(record, Used(1.0, 1 << 30) if has_tasks else NOTHING)
    split = report.finish(entitlements).split
    assert 0.53 <= split.guaranteed_share <= 0.57
    assert 0.43 <= split.opportunistic_share <= 0.47
    shares = [part.machines / total for part in (split.buffer, split.unused_quota)]
    shares += [(split.idle.machines + split.lent.machines) / total]
    assert all(share >= 0.05 for share in shares), shares  # buffers, unused quotas, freed machines
    assert sum(shares) + split.guaranteed.machines / total == pytest.approx(1.0)


@pytest.mark.behaviour("BUG-LB17")
@pytest.mark.parametrize("option", ["machines", "regions", "datacenters", "msbs"])
@pytest.mark.parametrize("number", ["0", "-1", "nan", "1.5"])
def test_numbers_of_a_region_that_cannot_be_made_are_refused(option, number, monkeypatch, capsys):
    """Formerly they gave a traceback, or an empty inventory without an error."""
    words = ["generator", "--machines", "10", f"--{option}", number]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"argument --{option}: {number!r} is no whole number from 1" in capsys.readouterr().err
