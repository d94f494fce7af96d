"""Two hosts with one identity are distinguished, and one host is never taken for two."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.api.presence import Presence, Verdict
from control_plane.api.duplicates import Duplicate
from control_plane.front_end.trail import Query, Trail
from control_plane.identity.core.duplicates import CloneFinding, Round, finding_of
from control_plane.identity.duplicates import DUPLICATES, DuplicateHosts
from control_plane.runtime.runtime import Runtime
from control_plane.store import Put
from control_plane.store.memory import MemoryStore
from wire.errors import Busy, NotFound, UnknownOutcome, Unreachable

pytestmark = pytest.mark.behaviour("F-89")


class Host:
    """A host whose agent calls as `agent.identity.clone_check` does."""

    numbers = count()

    def __init__(self, boot: str = "") -> None:
        self.boot, self.mark = boot or f"boot{next(self.numbers)}", ""

    def presence(self) -> Presence:
        return Presence(mark=self.mark, boot_id=self.boot)

    def agent_restarts(self) -> None:
        self.mark = ""

    def boots(self) -> None:
        self.boot, self.mark = f"boot{next(self.numbers)}", ""


class World:
    """A control plane, and the host that answers at the address of machine vm1."""

    def __init__(self, at_address: Host | None = None) -> None:
        self.store, self.there = MemoryStore(), at_address
        self.recorded: list[Duplicate] = []
        self.cut: list[str] = []
        self.happens: Callable[[], None] = lambda: None
        self.service = self.started()

    def started(self) -> DuplicateHosts:
        service = DuplicateHosts(self.store, Runtime(lambda: 1_700_000_000.0))
        service.ask, service.audit, service.disconnect = self._ask, self._record, self._disconnect
        return service

    async def _ask(self, _machine: str) -> Presence:
        self.happens()
        if self.there is None:
            raise Unreachable("no host")
        return self.there.presence()

    async def _record(self, duplicate: Duplicate) -> None:
        self.recorded.append(duplicate)

    async def _disconnect(self, machine: str) -> None:
        self.cut.append(machine)

    async def asks(self, host: Host, address: str = "10.0.0.9") -> Verdict:
        """Make one round as an agent does. An agent that ends during the round sends nothing
        more."""
        host.mark = mark = secrets.token_hex(4)
        presence = host.presence()
        for _ in range(3):
            answer = await self.service.check("vm1", presence, address)
            self.happens()
            if answer.verdict is not Verdict.AGAIN or host.mark != mark:
                break
        return answer.verdict


FAULTS = ("nothing", "agent", "reboot", "control plane", "cut", "back", "moved")


@pytest.mark.behaviour("F-89")
@given(st.lists(st.sampled_from(FAULTS), max_size=30))
def test_one_host_is_never_taken_for_two(faults: list[str]) -> None:
    """The faults are reboots, a disk restored from a snapshot, restarts of either side, cuts and
    other addresses. Each happens between any two steps.

    Restoring a disk implies a boot, because the marks of processes are on no disk.
    """
    host = Host()
    world, left = World(host), list(faults)

    def happens() -> None:
        match left.pop() if left else "nothing":
            case "agent":
                host.agent_restarts()
            case "reboot":
                host.boots()
            case "control plane":
                world.service = world.started()
            case "cut" | "moved":
                world.there = None
            case "back":
                world.there = host

    async def scenario() -> None:
        world.happens = happens
        async with world.store:
            while left:
                assert await world.asks(host) is not Verdict.SECOND
            assert not world.service.known

    asyncio.run(scenario())
    assert world.recorded == []


@pytest.mark.behaviour("F-89")
@given(st.lists(st.sampled_from(["first", "second", "control plane", "agent"]), max_size=12))
def test_two_hosts_are_found_in_any_order_of_requests(steps: list[str]) -> None:
    """The host at the machine's address keeps the identity."""
    first, second = Host(), Host()
    world = World(first)

    async def scenario() -> None:
        async with world.store:
            for step in steps:
                if step == "control plane":
                    world.service = world.started()
                    await world.service.load()
                elif step == "agent":
                    second.agent_restarts()
                elif step == "first":
                    assert await world.asks(first) is Verdict.ALONE
                else:
                    assert await world.asks(second) is Verdict.SECOND
            assert await world.asks(second) is Verdict.SECOND
            assert world.service.is_clone("vm1", second.boot)
            assert not world.service.is_clone("vm1", first.boot)

    asyncio.run(scenario())
    assert [(d.boot_id, d.other_boot_id) for d in world.recorded] == [(second.boot, first.boot)]


@pytest.mark.behaviour("F-89")
def test_a_process_that_ended_after_its_request_proves_nothing() -> None:
    """The request came from an agent that has restarted since, or whose host has."""
    for again in (Host.agent_restarts, Host.boots):
        host = Host()
        old = Presence(mark="m1", boot_id=host.boot)
        again(host)
        assert finding_of(Round(old, host.presence(), "", [])) is CloneFinding.DOUBT
        assert finding_of(Round(host.presence(), old, "m1", [])) is CloneFinding.DOUBT


@pytest.mark.behaviour("F-89")
def test_a_host_that_takes_a_running_hosts_address_is_the_clone() -> None:
    """A copy with the same address may answer there. The host that was known first keeps the
    identity."""
    first, second = Host(), Host()
    world = World(first)

    async def scenario() -> None:
        async with world.store:
            assert await world.asks(first) is Verdict.ALONE
            world.there = second
            assert await world.asks(second) is Verdict.ALONE, "it gets the request itself"
            assert await world.asks(first) is Verdict.ALONE
            assert world.service.is_clone("vm1", second.boot)
            assert world.cut == ["vm1"], "it gets no further message"
            assert await world.asks(second) is Verdict.SECOND

    asyncio.run(scenario())


@pytest.mark.behaviour("F-89")
def test_two_processes_from_one_snapshot_are_distinguished() -> None:
    """A virtual machine that was copied while it ran has the same boot id."""
    first, second = Host("same"), Host("same")
    world = World(first)

    async def scenario() -> None:
        async with world.store:
            assert await world.asks(first) is Verdict.ALONE
            assert await world.asks(second) is Verdict.SECOND
            assert await world.asks(first) is Verdict.ALONE
            assert not world.service.is_clone("vm1", "same"), "else the first one were cut off, too"

    asyncio.run(scenario())


@pytest.mark.behaviour("F-89")
def test_a_clone_stays_one_over_its_reboot_until_an_operator_overrides_it() -> None:
    """The clone keeps this state while the other host is cut off. After the operator's command the
    remaining host is the machine."""
    first, second = Host(), Host()
    world = World(first)

    async def scenario() -> None:
        async with world.store:
            await world.asks(second)
            world.there = None
            second.boots()
            assert await world.asks(second) is Verdict.SECOND
            assert await world.asks(first) is Verdict.ALONE
            world.service = world.started()
            await world.service.load()
            assert await world.asks(second) is Verdict.SECOND
            await world.service.forget("vm1")
            assert await world.asks(second) is Verdict.ALONE
            world.there = first
            assert await world.asks(second) is Verdict.SECOND, "both are there again"
            await world.service.joined("vm1")
            assert world.service.all().duplicates == []
            with pytest.raises(NotFound, match="has no known clone"):
                await world.service.forget("vm1")

    asyncio.run(scenario())


@pytest.mark.behaviour("F-89")
def test_a_damaged_record_is_found_again() -> None:
    """A damaged record does not prevent a start of the control plane."""
    first, second = Host(), Host()
    world = World(first)

    async def scenario() -> None:
        async with world.store:
            await world.store.txn({}, [Put(DUPLICATES + "vm1", b"{")])
            await world.service.load()
            assert world.service.all().duplicates == []
            assert await world.asks(second) is Verdict.SECOND

    asyncio.run(scenario())


@pytest.mark.behaviour("F-89")
def test_one_machine_is_checked_by_one_call_at_a_time() -> None:
    """Otherwise a host could make the control plane open any number of connections."""
    host = Host()
    world = World(host)

    async def scenario() -> None:
        async with world.store:
            going = asyncio.Event()

            async def slow(_machine: str) -> Presence:
                await going.wait()
                return host.presence()

            world.service.ask = slow
            first = asyncio.ensure_future(world.service.check("vm1", host.presence(), ""))
            await asyncio.sleep(0)
            with pytest.raises(Busy):
                await world.service.check("vm1", host.presence(), "")
            going.set()
            assert (await first).verdict is Verdict.ALONE

    asyncio.run(scenario())


@pytest.mark.behaviour("F-89")
def test_the_audit_log_has_one_entry_of_it() -> None:
    """It has both boots and the address from which the clone called."""
    first, second = Host(), Host()
    world = World(first)

    async def scenario() -> None:
        async with world.store:
            trail = Trail(world.store, Runtime())
            await trail.load()
            world.service.audit = trail.record_clone
            for _ in range(3):
                await world.asks(second)
            (entry,) = (await trail.page(Query())).entries
            assert (entry.action, entry.object) == ("duplicate_identity", "machine/vm1")
            assert (entry.caller, entry.address) == ("host:vm1", "10.0.0.9")
            assert first.boot[:8] in entry.reason
            assert second.boot[:8] in entry.reason

    asyncio.run(scenario())


async def test_a_write_without_an_answer_is_made_again() -> None:
    """A store may make a write without answering. The repeated write does not conflict with it."""
    first, second = Host(), Host()
    world = World(first)
    real, answers = world.store.txn, iter([False])

    async def txn(*arguments: Any) -> int:
        revision = await real(*arguments)
        if not next(answers, True):
            raise UnknownOutcome("the store did not report the outcome of the write")
        return revision

    async with world.store:
        world.store.txn = txn  # type: ignore[method-assign]
        await world.asks(first)
        with pytest.raises(UnknownOutcome):
            await world.asks(second)
        assert await world.asks(second) is Verdict.SECOND
    assert [duplicate.boot_id for duplicate in world.recorded] == [second.boot]
