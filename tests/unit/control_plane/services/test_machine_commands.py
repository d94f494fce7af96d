"""Commands to a broker about a machine cross processes, so they are data and can be compared."""

from __future__ import annotations

import msgspec
import pytest
from inventory import a_machine, loaded
from test_holds import TAKES, MortalStore, four_machines

from agent.api import ProfileState, ProfileStatus
from control_plane.api.machine_commands import (
    BeginEvent,
    EndEvents,
    ExpectReboot,
    MachineCommand,
    MarkDown,
    MarkUp,
    NoteProfile,
    QuarantineMachine,
    RaiseGeneration,
    WantProfile,
)
from control_plane.api.machines import EventKind, MachineState, UnavailabilityEvent
from control_plane.broker.core.commands import carried_out
from control_plane.store.memory import MemoryStore

EVENT = UnavailabilityEvent(event_id="e", kind=EventKind.PROFILE, reason="x", start=1.0)
COMMANDS: list[MachineCommand] = [
    MarkDown(reason="silent", until=10.0),
    MarkUp(),
    QuarantineMachine(reason="x", until=9.0),
    RaiseGeneration(above=3),
    WantProfile(entitlement="front", profile="web"),
    NoteProfile(seen=ProfileStatus(name="web", state=ProfileState.VERIFIED)),
    ExpectReboot(reason="x", deadline=9.0),
    BeginEvent(event=EVENT),
    EndEvents(kinds=[EventKind.PROFILE]),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_that_crossed_a_process_does_the_same(command: MachineCommand) -> None:
    again = msgspec.json.decode(msgspec.json.encode(command), type=MachineCommand)
    record = a_machine("m1")
    assert again == command
    assert carried_out(record, again, 5.0) == carried_out(record, command, 5.0)


def test_a_late_failure_report_is_not_recorded() -> None:
    record = a_machine("m1")
    late = MarkDown(reason="silent", until=10.0)
    assert carried_out(record, late, 10.0).state is MachineState.DOWN
    assert carried_out(record, late, 10.1) is record


async def test_a_value_changed_since_it_was_read_is_kept() -> None:
    async with MemoryStore() as store:
        brokers = await loaded(store)
        await brokers.add({name: a_machine(name) for name in ("m1", "m2")})
        broker = brokers.of("m1")
        read = {name: broker.table.revision(name) for name in ("m1", "m2")}
        await brokers.carry_out("m1", RaiseGeneration(above=7))
        await broker.carry_out({n: MarkDown(reason="x") for n in read}, read)
        assert [brokers.table.get(n).state for n in read] == [MachineState.UP, MachineState.DOWN]
        revision = broker.table.revision("m1")
        (after,) = await broker.carry_out({"m1": MarkDown(reason="x")}, {"m1": revision})
        assert after.state is MachineState.DOWN


@pytest.mark.behaviour("AV7")
async def test_only_brokers_of_a_transaction_learn_of_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker that does not answer blocks only allocations that include it."""
    sent: list[str] = []
    async with MortalStore() as store:
        brokers = await four_machines(store)
        for datacenter, broker in brokers.by_datacenter.items():
            for verb in ("commit", "abort"):

                async def noted(transaction: str, verb=verb, at=datacenter, of=broker.holds):  # type: ignore[no-untyped-def]
                    sent.append(f"{verb} {at}")
                    return await getattr(type(of), verb)(of, transaction)

                monkeypatch.setattr(broker.holds, verb, noted)
        await brokers.prepare("t1", {"m1": TAKES["m1"]})
        await brokers.commit("t1")
        await brokers.prepare("t2", {"m3": TAKES["m3"]})
        await brokers.abort("t2")
        await brokers.commit("t3")  # no broker holds anything for t3
    assert sent == ["commit dc0", "abort dc1"]


async def test_after_a_restart_holds_name_their_brokers() -> None:
    async with MemoryStore() as store:
        await (await four_machines(store)).prepare("t1", {n: TAKES[n] for n in ("m1", "m3")})
        again = await loaded(store)
        done = await again.commit("t1")
        assert sorted(record.machine for record in done) == ["m1", "m3"]
        assert again.in_doubt() == {}
