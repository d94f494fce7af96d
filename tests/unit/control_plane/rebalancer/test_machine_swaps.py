"""An exchange of two machines is completed, also across restarts, or cancelled."""

import asyncio

import pytest
from msgspec.structs import replace
from virtual_time import run
from world import World, a_job, a_region

from control_plane.api.capacity import EntitlementSpec
from control_plane.api.machines import MachineState
from control_plane.api.rebalancing import MoveView, SwapState, SwapView
from control_plane.api.settings import RebalanceMode, RebalanceSettings
from control_plane.rebalancer.core.model import Effort, RegionModel, SolverAnswer
from control_plane.rebalancer.core.solving import solve
from control_plane.roles import ControlPlane
from control_plane.store import Delete
from control_plane.store.records import REBALANCE
from wire.errors import Busy

pytestmark = pytest.mark.behaviour("RE3")

OF = {"m1": "front", "m2": "front", "m3": "front", "m4": "back", "m5": "back", "m6": "back"}
OTHER_TYPE = ("m3", "m4", "m5")
"""These machines have 7 % more memory."""


class Exchanging(World):
    """Two entitlements of three machines; each has one machine of the other's type."""

    def __init__(self, **changes) -> None:
        knobs = {"mode": RebalanceMode.APPLY, "every_s": 60.0, "swaps_per_plan": 1} | changes
        super().__init__(
            a_region(6), rebalance=RebalanceSettings(**knobs), give_back_after_s=100_000.0
        )
        for name in OTHER_TYPE:
            self.region.machines[name].memory_bytes = 1100 << 20

    def control_plane(self) -> ControlPlane:
        async def solved_here(model: RegionModel, effort: Effort) -> SolverAnswer:
            counted = Effort(steps=500, moves=effort.moves, swaps=effort.swaps)
            return solve(model, counted, clock=lambda: 0.0)

        made = super().control_plane()
        made.rebalancer.planner._solve = solved_here
        return made

    async def begin(self) -> None:
        for machine in self.region.machines.values():
            await self.cp.joined(machine.join())
        for pool, profile in (("front", "web"), ("back", "batch")):
            await self.cp.capacity.put_entitlement(
                pool, EntitlementSpec(machines=3, host_profile=profile)
            )
        for name, pool in OF.items():
            assert await self.cp._allocator.take(name, pool)
        for pool in ("front", "back"):
            await self.cp.apply_job(a_job(3, name=f"job-{pool}", entitlement=pool))
            await self.stable(f"job-{pool}")

    def held(self) -> dict[str, str]:
        table = self.cp._broker.table
        return {name: table.get(name).entitlement for name in OF}

    def ended(self, state: SwapState) -> bool:
        return any(swap.state is state for swap in self.cp.rebalancer.history().swaps)


EXCHANGED = OF | {"m3": "back", "m6": "front"}


@pytest.mark.parametrize("restarts", [False, True])
def test_both_sides_drain_then_each_machine_gets_the_other_profile(restarts: bool) -> None:
    async def main() -> None:
        w = Exchanging()
        async with asyncio.timeout(20_000):
            async with w.running():
                await w.begin()
                assert w.held() == OF
                if restarts:
                    await w.until(lambda: w.cp.rebalancer.swaps.under_way(), 2_000)
                else:
                    await w.until(lambda: w.ended(SwapState.DONE), 2_000)
            async with w.running():
                await w.until(lambda: w.ended(SwapState.DONE), 2_000)
                assert w.held() == EXCHANGED

                def switched() -> bool:
                    profiles = [w.region.machines[name].profile.name for name in ("m3", "m6")]
                    return profiles == ["batch", "web"]

                await w.until(switched)
                for pool in ("front", "back"):
                    await w.stable(f"job-{pool}")
                await asyncio.sleep(600)
                assert len(w.cp.rebalancer.history().swaps) == 1
                (swap,) = w.cp.rebalancer.history().swaps
                lines = w.cp.rebalancer.explain(swap.id).lines
                assert lines[0].endswith(("between front and back.", "between back and front."))
        assert w.region.broken_rules == []

    run(main())


@pytest.mark.behaviour("BUG-CP127")
def test_a_restart_does_not_repeat_an_exchange_of_the_resumed_plan() -> None:
    """The stored plan still has the exchange, which would return both machines if repeated."""
    gone = MoveView(id="", job="ghost", task=0, from_machine="m1", to_machine="m2")

    class Moving(Exchanging):
        def control_plane(self) -> ControlPlane:
            made = super().control_plane()
            solve_here = made.rebalancer.planner._solve

            async def with_a_move(model: RegionModel, effort: Effort) -> SolverAnswer:
                return replace(await solve_here(model, effort), moves=[gone])

            made.rebalancer.planner._solve = with_a_move
            return made

    async def main() -> None:
        w = Moving(every_s=600.0)
        async with asyncio.timeout(20_000):
            async with w.running():
                await w.begin()
                await w.until(lambda: w.ended(SwapState.DONE), 2_000)
                assert w.held() == EXCHANGED
            async with w.running():
                assert w.cp.rebalancer.records.plan.swaps
                await asyncio.sleep(300)
                assert w.held() == EXCHANGED
                assert len(w.cp.rebalancer.history().swaps) == 1
                assert not w.cp.rebalancer.swaps.under_way()

    run(main())


def test_an_exchange_is_called_off_while_the_region_is_unwell() -> None:
    async def main() -> None:
        w = Exchanging()
        async with asyncio.timeout(20_000), w.running():
            await w.begin()
            await w.until(lambda: w.cp.rebalancer.swaps.under_way(), 2_000)
            w.cp.rebalancer._unwell = lambda: "much is lost"
            await w.until(lambda: w.ended(SwapState.WITHDRAWN), 2_000)
            assert w.cp.rebalancer.history().swaps[0].reason == "much is lost"
            records = [w.cp._broker.table.get(name) for name in ("m3", "m6")]
            assert all(e.end is not None for r in records for e in r.unavailability)
            assert all(record.state is MachineState.UP for record in records)

    run(main())


@pytest.mark.behaviour("BUG-CP82")
def test_an_exchange_ends_when_rebalancing_is_switched_off() -> None:
    """Formerly the machines of the exchange stayed drained, and no component ended that."""

    async def main() -> None:
        w = Exchanging()
        async with asyncio.timeout(20_000):
            async with w.running():
                await w.begin()
                await w.until(lambda: w.cp.rebalancer.swaps.under_way(), 2_000)
            off = RebalanceSettings(mode=RebalanceMode.OFF)
            w.settings = replace(w.settings, rebalance=off)
            async with w.running():
                await w.until(lambda: w.ended(SwapState.WITHDRAWN), 2_000)
                records = [w.cp._broker.table.get(name) for name in ("m3", "m6")]
                assert all(e.end is not None for r in records for e in r.unavailability)

    run(main())


@pytest.mark.behaviour("BUG-CP122")
@pytest.mark.parametrize("mode", [RebalanceMode.APPLY, RebalanceMode.OFF])
def test_drains_of_an_exchange_end_when_its_record_is_lost(mode: RebalanceMode) -> None:
    """The record is damaged and set aside: nothing else knows why the machines are drained."""

    async def main() -> None:
        w = Exchanging()
        async with asyncio.timeout(20_000):
            async with w.running():
                await w.begin()
                await w.until(lambda: w.cp.rebalancer.swaps.under_way(), 2_000)
                records = [w.cp._broker.table.get(name) for name in ("m3", "m6")]
                assert all(any(e.end is None for e in r.unavailability) for r in records)
            await w.store.__aenter__()
            await w.store.txn({}, [Delete(f"{REBALANCE}swaps")])
            await w.store.__aexit__(None, None, None)
            knobs = RebalanceSettings(mode=mode, every_s=600.0)
            w.settings = replace(w.settings, rebalance=knobs)

            def are_free() -> bool:
                records = [w.cp._broker.table.get(name) for name in ("m3", "m6")]
                return all(e.end is not None for r in records for e in r.unavailability)

            async with w.running():
                await w.until(are_free, 300)
                assert w.cp.rebalancer.swaps.all() == []

    run(main())


PLANNED = SwapView(id="s1.1", one="m3", two="m6", pool_one="front", pool_two="back")


@pytest.mark.behaviour("BUG-CP159")
def test_an_exchange_begins_between_the_entitlements_of_its_plan_only() -> None:
    async def main() -> None:
        w = Exchanging(swaps_per_plan=0)
        async with asyncio.timeout(20_000), w.running():
            await w.begin()
            swaps = w.cp.rebalancer.swaps
            await swaps.begin([replace(PLANNED, pool_one="former")])
            assert swaps.under_way() == []
            await swaps.begin([replace(PLANNED, pool_one="", pool_two="")])
            assert [(s.pool_one, s.pool_two) for s in swaps.under_way()] == [("front", "back")]

    run(main())


@pytest.mark.behaviour("BUG-CP160")
def test_an_exchange_whose_announcement_fails_does_not_stop_the_rebalancer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exchange is stored, so the next check announces its machines."""

    async def refuse(*_: object, **__: object) -> None:
        raise Busy("the store of a data center does not answer")

    async def main() -> None:
        w = Exchanging(swaps_per_plan=0)
        async with asyncio.timeout(20_000), w.running():
            await w.begin()
            swaps = w.cp.rebalancer.swaps
            with monkeypatch.context() as patched:
                patched.setattr(swaps._drains, "plan_unavailability", refuse)
                await swaps.begin([PLANNED])
            assert [swap.state for swap in swaps.under_way()] == [SwapState.DRAINING]
            await w.until(lambda: w.ended(SwapState.DONE), 2_000)
            assert w.held() == EXCHANGED

    run(main())


def test_nothing_is_exchanged_unless_an_operator_wants_that() -> None:
    async def main() -> None:
        w = Exchanging(swaps_per_plan=0)
        async with asyncio.timeout(20_000), w.running():
            await w.begin()
            await asyncio.sleep(600)
            assert w.cp.rebalancer.swaps.all() == []
            assert w.held() == OF

    run(main())
