"""Calls and listeners when the bus is lost, which a real bus does not do on demand."""

from __future__ import annotations

import errno
import os
import queue
import time
from collections.abc import Callable, Iterator

import pytest
from pystemd.dbusexc import DBusBaseError

from agent.machine.systemd import HostSystemd
from agent.machine.systemd_calls import MANAGER, PROPERTIES
from wire.errors import Conflict, SystemdError

UNIT = "t.service"
A_SERVICE = {"ExecStart": [["/bin/true"]], "CPUWeight": 50, "MemoryMax": 1}
LOST = DBusBaseError(-errno.ECONNRESET, None, "Connection reset by peer")
ROW = (b"t.service", b"about it", b"loaded", b"active", b"running", b"", b"/", 0, b"", b"/")
OVER = (*ROW[:3], b"failed", b"failed", *ROW[5:])


class Reply:
    """A message with a body or none."""

    def __init__(self, body: object = None) -> None:
        """Store the body of the answer."""
        self.body = body


class Signal:
    """A message as `process` returns it."""

    def __init__(self, member: bytes = b"", path: bytes = b"", body: object = None) -> None:
        """Store the content of the signal; without a member it is no signal."""
        self.member, self.path, self.body = member, path, body

    def is_signal(self, interface: bytes, member: bytes) -> bool:
        """Return whether it is this signal."""
        known = PROPERTIES if member == b"PropertiesChanged" else MANAGER
        return member == self.member and interface == known

    def get_member(self) -> bytes:
        """Return its name."""
        return self.member

    def get_path(self) -> bytes:
        """Return the path of the object that it is about."""
        return self.path

    def process_reply(self) -> None:
        """Do nothing: the body is already present."""


class Bus:
    """A connection whose answers are scripted by method; an error is raised."""

    def __init__(self, answers: dict[str, object]) -> None:
        """Store the answers: a value, an error, or a function without arguments."""
        self.answers = answers
        self.calls: list[str] = []
        self.signals: queue.Queue[Signal | DBusBaseError] = queue.Queue()
        self.read, self.write = os.pipe()
        self.open = True

    def call_method(
        self, destination: bytes, path: bytes, interface: bytes, method: bytes, args: list[object]
    ) -> Reply:
        """Return the scripted answer."""
        name = method.decode()
        if name == "Get":
            name = f"Get {args[-1][1].decode()}"  # type: ignore[index]
        self.calls.append(name)
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return Reply(answer() if callable(answer) else answer)

    def send(self, signal: Signal | DBusBaseError) -> None:
        """Deliver a signal."""
        self.signals.put(signal)
        os.write(self.write, b"x")

    def process(self) -> Signal | None:
        """Return the next signal, None if there is none."""
        if self.signals.empty():
            return None
        os.read(self.read, 1)
        found = self.signals.get()
        if isinstance(found, Exception):
            raise found
        return found

    def get_fd(self) -> int:
        """Return the descriptor that becomes readable with each signal."""
        return self.read

    def close(self) -> None:
        """Close the connection; a second close would crash the real one."""
        assert self.open
        self.open = False
        os.close(self.read)
        os.close(self.write)


Connect = Callable[..., HostSystemd]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Yield a function that makes a service manager which opens these connections in turn."""
    made: list[HostSystemd] = []
    opened: list[Bus] = []

    def build(*buses: Bus | DBusBaseError) -> HostSystemd:
        left = list(buses)

        def opener() -> Bus:
            bus = left.pop(0)
            if isinstance(bus, Exception):
                raise bus
            opened.append(bus)
            return bus

        made.append(HostSystemd(opener))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for systemd in made:
        systemd.close()
    assert not [bus for bus in opened if bus.open]


def a_unit(**changes: object) -> dict[str, object]:
    """Return answers about one running unit."""
    return {
        "ListUnitsByPatterns": [ROW],
        "Get InvocationID": [0xAB] * 16,
        "Get ControlGroup": b"/system.slice/t.service",
        "Get ExecMainStartTimestamp": 1_500_000,
        "Get MainPID": 42,
        **changes,
    }


def test_a_lost_connection_is_made_again(connect: Connect) -> None:
    lost, good = Bus({"StopUnit": LOST}), Bus({})
    systemd = connect(lost, good)

    systemd.stop(UNIT)

    assert (lost.calls, good.calls) == (["StopUnit"], ["StopUnit"])
    assert not lost.open


def test_a_bus_that_stays_away_is_an_error_in_the_end(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    systemd = connect(*[DBusBaseError(-errno.ECONNREFUSED, None, "") for _ in range(6)])

    with pytest.raises(SystemdError, match=r"cannot stop t\.service: Connection refused"):
        systemd.stop(UNIT)


def test_a_start_that_got_through_before_the_loss_is_not_repeated(connect: Connect) -> None:
    lost = Bus({"StartTransientUnit": LOST})
    good = Bus(a_unit(**{"Get InactiveExitTimestampMonotonic": 2**62}))
    systemd = connect(lost, good)

    systemd.start_transient(UNIT, A_SERVICE)

    assert "StartTransientUnit" not in good.calls


def test_a_lost_start_is_repeated(connect: Connect) -> None:
    lost, good = Bus({"StartTransientUnit": LOST}), Bus({"ListUnitsByPatterns": []})
    systemd = connect(lost, good)

    systemd.start_transient(UNIT, A_SERVICE)

    assert good.calls == ["ListUnitsByPatterns", "StartTransientUnit"]


def test_an_older_unit_is_not_taken_for_the_lost_start(connect: Connect) -> None:
    exists = DBusBaseError(-errno.EEXIST, b"org.freedesktop.systemd1.UnitExists", b"is there")
    lost = Bus({"StartTransientUnit": LOST})
    good = Bus(a_unit(**{"Get InactiveExitTimestampMonotonic": 1, "StartTransientUnit": exists}))
    systemd = connect(lost, good)

    with pytest.raises(Conflict, match=r"cannot start t\.service: is there"):
        systemd.start_transient(UNIT, A_SERVICE)


def test_a_start_while_its_journal_ends_is_tried_again(connect: Connect) -> None:
    """The last task of a namespace ends its journal as well; the next task waits for that."""
    name = b"org.freedesktop.systemd1.TransactionIsDestructive"
    message = b"Transaction for t.service/start is destructive"
    systemd = connect(Bus({"StartTransientUnit": DBusBaseError(-errno.EDEADLK, name, message)}))

    with pytest.raises(Conflict, match="destructive"):
        systemd.start_transient(UNIT, A_SERVICE)


def test_a_start_without_an_answer_counts_if_the_unit_is_there(connect: Connect) -> None:
    timeout = DBusBaseError(-errno.ETIMEDOUT, None, "Connection timed out")
    answers = a_unit(**{"Get InactiveExitTimestampMonotonic": 2**62, "StartTransientUnit": timeout})
    there, missing = Bus(answers), Bus({"StartTransientUnit": timeout, "ListUnitsByPatterns": []})

    connect(there).start_transient(UNIT, A_SERVICE)
    with pytest.raises(SystemdError, match="timed out"):
        connect(missing).start_transient(UNIT, A_SERVICE)


def test_the_property_that_systemd_complains_of_is_named_with_its_value(connect: Connect) -> None:
    refusal = DBusBaseError(-errno.EINVAL, None, b"Value specified in CPUWeight is out of range")
    systemd = connect(Bus({"StartTransientUnit": refusal}))

    with pytest.raises(SystemdError, match=r"start t\.service with CPUWeight=50: Value specified"):
        systemd.start_transient(UNIT, A_SERVICE)


@pytest.mark.parametrize("method", ["StopUnit", "KillUnit", "ResetFailedUnit"])
def test_only_a_missing_unit_is_no_error(connect: Connect, method: str) -> None:
    missing = DBusBaseError(-errno.ENOENT, b"org.freedesktop.systemd1.NoSuchUnit", b"not loaded")
    denied = DBusBaseError(-errno.EACCES, None, b"Access denied")
    calls: dict[str, Callable[[HostSystemd], None]] = {
        "StopUnit": lambda s: s.stop(UNIT),
        "KillUnit": lambda s: s.kill(UNIT, 9),
        "ResetFailedUnit": lambda s: s.reset_failed(UNIT),
    }

    calls[method](connect(Bus({method: missing})))
    with pytest.raises(SystemdError, match=r"t\.service: Access denied"):
        calls[method](connect(Bus({method: denied})))


def test_a_running_unit_is_read_with_few_calls(connect: Connect) -> None:
    bus = Bus(a_unit())

    state = connect(bus).find(UNIT)

    assert state
    assert (state.description, state.started_at) == ("about it", 1.5)
    assert state.invocation_id == "ab" * 16
    assert bus.calls == ["ListUnitsByPatterns", "Get InvocationID", "Get ExecMainStartTimestamp"]


def test_the_main_process_and_the_cgroup_of_each_unit_are_read(connect: Connect) -> None:
    (state,) = connect(Bus(a_unit())).units("t*")

    assert (state.main_pid, state.control_group) == (42, "/system.slice/t.service")


@pytest.mark.behaviour("BUG-AG105")
@pytest.mark.parametrize(
    ("code", "status", "name"),
    [(2, 9, "SIGKILL"), (3, 40, "SIGRTMIN+6"), (2, 34, "SIGRTMIN"), (2, 32, "SIG32")],
)
def test_the_signal_that_ended_a_unit_is_named(
    connect: Connect, code: int, status: int, name: str
) -> None:
    ended = {"ListUnitsByPatterns": [OVER], "Get MainPID": 0, "Get Result": b"signal"}
    ended |= {"Get ExecMainExitTimestamp": 2_000_000}
    answers = a_unit(**ended, **{"Get ExecMainCode": code, "Get ExecMainStatus": status})

    state = connect(Bus(answers)).find(UNIT)

    assert state
    assert (state.exit_code, state.exit_signal, state.exited_at) == (None, name, 2.0)


@pytest.mark.parametrize(("up_usec", "result"), [(0, "start-timeout"), (1, "timeout")])
def test_a_unit_that_never_started_exceeded_its_start_limit(
    connect: Connect, up_usec: int, result: str
) -> None:
    ended = {"ListUnitsByPatterns": [OVER], "Get MainPID": 0, "Get Result": b"timeout"}
    ended |= {"Get ExecMainExitTimestamp": 0}
    ended |= {"Get ActiveEnterTimestamp": up_usec}
    answers = a_unit(**ended, **{"Get ExecMainCode": 0, "Get ExecMainStatus": 0})

    state = connect(Bus(answers)).find(UNIT)

    assert state
    assert state.result == result


def test_signals_name_the_unit_whichever_they_are(connect: Connect) -> None:
    bus = Bus({})
    changed_units: queue.Queue[str] = queue.Queue()
    connect(bus).listen(changed_units.put)

    path = b"/org/freedesktop/systemd1/unit/a_2db_2eservice"
    bus.send(Signal(b"PropertiesChanged", path))
    assert changed_units.get(timeout=5) == "a-b.service"
    bus.send(Signal(b"JobRemoved", body=[1, b"/job/1", b"c.service", b"done"]))
    assert changed_units.get(timeout=5) == "c.service"
    bus.send(Signal(b"UnitRemoved", body=[b"d.service", b"/unit/d"]))
    assert changed_units.get(timeout=5) == "d.service"


def test_changes_of_a_starting_unit_are_reported_once_it_has_started(connect: Connect) -> None:
    bus = Bus({})
    changed_units: queue.Queue[str] = queue.Queue()
    connect(bus).listen(changed_units.put)
    changed = Signal(b"PropertiesChanged", b"/org/freedesktop/systemd1/unit/a_2eservice")

    bus.send(Signal(b"JobNew", body=[1, b"/job/1", b"a.service"]))
    bus.send(changed)
    bus.send(changed)
    bus.send(Signal(b"UnitRemoved", body=[b"other.service", b"/unit/other"]))
    assert changed_units.get(timeout=5) == "other.service"
    bus.send(Signal(b"JobRemoved", body=[1, b"/job/1", b"a.service", b"done"]))
    assert changed_units.get(timeout=5) == "a.service"
    bus.send(changed)
    assert changed_units.get(timeout=5) == "a.service"


def test_the_end_of_a_job_and_the_change_that_follows_are_reported_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.machine.unit_watch.JOB_SETTLES_S", 60.0)
    bus = Bus({})
    changed_units: queue.Queue[str] = queue.Queue()
    connect(bus).listen(changed_units.put)

    bus.send(Signal(b"JobNew", body=[1, b"/job/1", b"a.service"]))
    bus.send(Signal(b"JobRemoved", body=[1, b"/job/1", b"a.service", b"done"]))
    bus.send(Signal(b"PropertiesChanged", b"/org/freedesktop/systemd1/unit/a_2eservice"))
    bus.send(Signal(b"UnitRemoved", body=[b"other.service", b"/unit/other"]))

    received = [changed_units.get(timeout=5)]
    while received[-1] != "other.service":
        received.append(changed_units.get(timeout=5))
    assert received == ["a.service", "other.service"]


def test_a_unit_that_vanishes_with_its_job_is_reported_at_once(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.machine.unit_watch.JOB_SETTLES_S", 60.0)
    bus = Bus({})
    changed_units: queue.Queue[str] = queue.Queue()
    connect(bus).listen(changed_units.put)

    bus.send(Signal(b"JobRemoved", body=[1, b"/job/1", b"a.service", b"done"]))
    bus.send(Signal(b"UnitRemoved", body=[b"a.service", b"/unit/a"]))

    assert changed_units.get(timeout=5) == "a.service"


def test_changes_of_other_units_than_services_call_no_listener(connect: Connect) -> None:
    """A start changes the slices, mounts and targets that the unit depends on."""
    bus = Bus({})
    changed_units: queue.Queue[str] = queue.Queue()
    connect(bus).listen(changed_units.put)

    bus.send(Signal(b"JobRemoved", body=[1, b"/job/1", b"workload-web.slice", b"done"]))
    bus.send(Signal(b"UnitRemoved", body=[b"var.mount", b"/unit/v"]))
    bus.send(Signal(b"UnitRemoved", body=[b"d.service", b"/unit/d"]))

    assert changed_units.get(timeout=5) == "d.service"


def test_a_listener_receives_an_empty_name_after_a_bus_reconnect(connect: Connect) -> None:
    first, second = Bus({}), Bus({})
    changed_units: queue.Queue[str] = queue.Queue()
    systemd = connect(first, DBusBaseError(-errno.ECONNREFUSED, None, ""), second)
    systemd.listen(changed_units.put)

    first.send(LOST)

    assert changed_units.get(timeout=5) == ""
    second.send(Signal(b"UnitRemoved", body=[b"d.service", b"/unit/d"]))
    assert changed_units.get(timeout=5) == "d.service"


def test_a_listener_that_fails_does_not_silence_the_others(connect: Connect) -> None:
    bus = Bus({})
    changed_units: queue.Queue[str] = queue.Queue()
    systemd = connect(bus)

    def fails(unit: str) -> None:
        raise RuntimeError(unit)

    systemd.listen(fails)
    systemd.listen(changed_units.put)
    for _ in range(2):
        bus.send(Signal(b"UnitRemoved", body=[b"d.service", b"/unit/d"]))
        assert changed_units.get(timeout=5) == "d.service"


def test_no_bus_to_listen_to_is_an_error_at_once(connect: Connect) -> None:
    systemd = connect(DBusBaseError(-errno.ECONNREFUSED, None, ""))

    with pytest.raises(SystemdError, match="cannot subscribe to systemd: Connection refused"):
        systemd.listen(lambda unit: None)
