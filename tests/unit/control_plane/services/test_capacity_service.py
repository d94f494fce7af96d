"""Capacity through the whole control plane: grant, deploy, refuse, report."""

import asyncio

import pytest
from msgspec.structs import replace
from world import World, a_job, scenario

from control_plane.api.capacity import EntitlementChange, EntitlementSpec, RequestState
from control_plane.api.inventory import InventoryMachine
from control_plane.api.machines import Hardware
from control_plane.api.settings import Approval, PowerSettings
from control_plane.portal.portal import Person
from wire.errors import InvalidInput, NotFound, Unprocessable

ANN, ROOT = Person("ann"), Person("local:0", is_operator=True)


def change(**fields) -> EntitlementChange:
    return EntitlementChange(spec=EntitlementSpec(**({"host_profile": "web"} | fields)))


async def joined(w: World) -> None:
    for machine in w.region.machines.values():
        await w.cp.joined(machine.join())


@pytest.mark.behaviour("CP1", "CP2", "CP12", "MO8")
@scenario()
async def test_a_job_runs_once_its_entitlement_is_approved(w: World):
    await joined(w)
    portal = w.cp.capacity.portal
    portal.settings = replace(portal.settings, approval=Approval.ALWAYS)
    request = await w.cp.capacity.request("front", change(machines=3), ANN)
    assert request.state is RequestState.PENDING
    with pytest.raises(InvalidInput, match="there is no entitlement 'front'"):
        await w.cp.apply_job(a_job())
    with pytest.raises(NotFound, match=f"{request.request_id} waits for approval"):
        await w.cp.capacity.get_entitlement("front")
    await w.cp.capacity.approve(request.request_id, ROOT, "")
    await w.cp.apply_job(a_job())
    await w.stable()


@pytest.mark.behaviour("CP1", "CP3", "CP7")
@scenario(give_back_after_s=5)
async def test_a_smaller_quota_counts_at_once_and_machines_go_back_as_they_empty(
    w: World,
):
    await joined(w)
    await w.cp.capacity.put_entitlement("front", EntitlementSpec(machines=3, host_profile="web"))
    await w.cp.apply_job(a_job(3))
    await w.stable()
    with pytest.raises(Unprocessable, match="3 machines granted to others"):
        await w.cp.capacity.put_entitlement("back", EntitlementSpec(machines=1))
    await w.cp.capacity.put_entitlement("front", EntitlementSpec(machines=1, host_profile="web"))
    await w.cp.capacity.put_entitlement("back", EntitlementSpec(machines=2))
    await w.cp.stop_job("web")

    async def given_back() -> bool:
        return (await w.cp.capacity.get_entitlement("front")).held == []

    await w.until(given_back, within_s=300)


@pytest.mark.behaviour("BUG-UX8")
@scenario()
async def test_a_quota_below_the_held_machines_is_granted_with_a_warning(w: World):
    """A dry run warns too. A sufficient quota causes no warning."""
    await joined(w)
    await w.cp.capacity.put_entitlement("front", EntitlementSpec(machines=3, host_profile="web"))
    await w.cp.apply_job(a_job(3))
    await w.stable()
    held = len((await w.cp.capacity.get_entitlement("front")).held)
    assert held > 1
    for dry_run in (True, False):
        less = replace(change(machines=1), dry_run=dry_run)
        made = await w.cp.capacity.request("front", less, ROOT)
        assert made.state is RequestState.APPROVED
        assert [w.split(":")[0] for w in made.warnings] == [
            f"it holds more than its quota, {held} machines of 1"
        ]
    made = await w.cp.capacity.request("front", change(machines=held), ROOT)
    assert made.warnings == []


@pytest.mark.behaviour("MO13", "CP8", "CP11")
@scenario()
async def test_the_report_shows_what_tasks_were_promised(w: World):
    await joined(w)
    spec = EntitlementSpec(machines=2, host_profile="web", business_unit="ads/rank")
    await w.cp.capacity.put_entitlement("front", spec)
    await w.cp.apply_job(a_job(4))
    await w.stable()
    await asyncio.sleep(1)
    report = await w.cp.capacity.report()
    units = {line.name: line for line in report.units}
    assert (units["ads"].granted_machines, units["ads"].held.machines) == (2, 2)
    assert units["ads"].used.memory_bytes == 4 * (128 << 20)
    assert report.split.guaranteed.machines == 2
    assert report.split.buffer.machines == 1
    assert report.fragmentation.small == 1
    assert report.short == []


@pytest.mark.behaviour("AL22")
@scenario(power=PowerSettings(budgets_w={"dc1": 600}))
async def test_a_data_center_without_power_keeps_tasks_waiting_and_reports_it(w: World):
    """One of its two machines of 400 W may be used; the other one once the draw is corrected."""
    hardware = Hardware(cpus=2, memory_bytes=4 << 30, power_w=400)
    listed = [
        InventoryMachine(
            machine=m.name, location=m.location, machine_type="generic", hardware=hardware
        )
        for m in w.region.machines.values()
    ]
    await w.cp._broker.import_machines(listed)
    await joined(w)
    await w.cp.capacity.put_entitlement("front", EntitlementSpec(machines=3, host_profile="web"))
    await w.cp.apply_job(a_job(3, cpus=2.0))
    await asyncio.sleep(60)
    explained = await w.cp.job_planner.explain("web")
    assert (explained.placed, len(explained.waiting)) == (2, 1)
    message = "machine: power: dc1 has 350 W left of 750 W; another machine draws 400 W"
    assert any(message in reason for reason in explained.reasons), explained.reasons
    report = await w.cp.capacity.report()
    [budget] = report.power
    assert (budget.place, budget.budget_w, budget.limit_w, budget.used_w) == ("dc1", 600, 750, 400)
    cooler = replace(hardware, power_w=200)
    await w.cp._broker.import_machines([replace(one, hardware=cooler) for one in listed])
    await w.stable()


@pytest.mark.behaviour("CP1")
@scenario()
async def test_quotas_above_the_machines_are_reported(w: World):
    await joined(w)
    await w.cp.capacity.put_entitlement("front", EntitlementSpec(machines=3, host_profile="web"))
    portal = w.cp.capacity.portal
    lost = w.cp._broker.table.get("m3")
    portal.supply.on_machine_change("m3", lost, None)
    report = await w.cp.capacity.report()
    assert report.short == [
        "front: the whole region: nothing granted to others + 3 machines asked > 2 machines"
    ]
