"""The service manager of the host, over D-Bus.

Works below pystemd's generated proxies: those introspect and build classes for each unit,
which makes reading one unit cost as much as its start. Each instance has one connection
(`bus.py`) for calls, behind a lock, and one for signals, read by a thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from pystemd.dbusexc import DBusBaseError
from pystemd.dbuslib import path_decode, path_encode

from agent.machine import Property, UnitListener, UnitState
from agent.machine.bus import Bus, Message, open_bus
from agent.machine.unit_properties import CLOSE, Token, encode
from wire.errors import Conflict, SystemdError

log = logging.getLogger(__name__)

SYSTEMD = b"org.freedesktop.systemd1"
ROOT = b"/org/freedesktop/systemd1"
UNITS = b"/org/freedesktop/systemd1/unit"
MANAGER = b"org.freedesktop.systemd1.Manager"
PROPERTIES = b"org.freedesktop.DBus.Properties"
BUS = b"org.freedesktop.DBus"

_DEAD = frozenset(
    {errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE, errno.ESHUTDOWN, errno.ECONNREFUSED}
)
_GONE = re.compile("Disconnected|NoReply|ServiceUnknown|NameHasNoOwner|NoServer")
"""Errors of a bus that has just been restarted, or that systemd has not come back to."""
_NO_UNIT = re.compile("NoSuchUnit|UnknownObject|NoSuchProcess")
_PAUSES_S = (0.0, 0.1, 0.4, 1.0, 2.0)
"""Between attempts on a dead bus. `systemctl restart dbus` is over in that time."""
_BACKOFF_MAX_S = 5.0
_MATCHES = (
    "type='signal',sender='org.freedesktop.systemd1',"
    "path_namespace='/org/freedesktop/systemd1/unit',"
    "interface='org.freedesktop.DBus.Properties',member='PropertiesChanged',"
    "arg0='org.freedesktop.systemd1.Service'",
    "type='signal',sender='org.freedesktop.systemd1',"
    "interface='org.freedesktop.systemd1.Manager',member='JobNew'",
    "type='signal',sender='org.freedesktop.systemd1',"
    "interface='org.freedesktop.systemd1.Manager',member='JobRemoved'",
    "type='signal',sender='org.freedesktop.systemd1',"
    "interface='org.freedesktop.systemd1.Manager',member='UnitRemoved'",
)
"""The bus drops other signals before they are copied to us. A start changes a dozen slices, mounts
and targets that the unit depends on. Only services have properties of `Service`, and systemd
sends them just before those of `Unit` (bus_unit_send_change_signal of systemd 257)."""
JOB_SETTLES_S = 0.05
"""Time in s to wait after the end of a unit's job for the unit's own change, which follows at once:
a listener that is called at the first of the two would read the unit twice."""

_SIGNALS = {
    b"PropertiesChanged": PROPERTIES,
    b"JobNew": MANAGER,
    b"JobRemoved": MANAGER,
    b"UnitRemoved": MANAGER,
}
"""Signals we asked for, and the interface each is of."""

Opener = Callable[[], Bus]


class HostSystemd:
    """Units of the host. Needs root. May be called from any thread."""

    def __init__(self, opener: Opener = open_bus) -> None:
        """Connect on the first call, not before."""
        self._opener = opener
        self._bus: Bus | None = None
        self._lock = threading.Lock()
        self._watch: _UnitWatch | None = None

    def start_transient(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Queue the start of a transient unit; `find` and the listeners tell what came of it.

        A bus that dies in between leaves open whether systemd got the request: a unit that
        then exists and is younger than the request is the one we asked for.
        """
        args = [*words("s", unit), *words("s", "fail"), *encode(properties)]
        args += [(ord("a"), b"(sa(sv))"), CLOSE]
        asked_usec = time.monotonic_ns() // 1000
        try:
            self._manager("StartTransientUnit", args, on_loss=lambda: self._is_up(unit, asked_usec))
        except DBusBaseError as e:
            raise _refused(f"cannot start {unit}", e, properties) from e

    def stop(self, unit: str) -> None:
        """Queue the stop of a unit; one that is not there is no error."""
        self._on_unit("stop", unit, "StopUnit", [*words("ss", unit, "replace")])

    def kill(self, unit: str, signal: int) -> None:
        """Signal every process of a unit; one that is not there is no error."""
        args = [*words("ss", unit, "all"), (ord("i"), signal)]
        self._on_unit(f"send signal {signal} to", unit, "KillUnit", args)

    def reset_failed(self, unit: str) -> None:
        """Let systemd forget a failed unit; one that is not there is no error."""
        self._on_unit("reset", unit, "ResetFailedUnit", [*words("s", unit)])

    def set_properties(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Change properties of a running unit until the next boot."""
        args = [*words("s", unit), (ord("b"), True), *encode(properties)]
        try:
            self._manager("SetUnitProperties", args)
        except DBusBaseError as e:
            raise _refused(f"cannot change {unit}", e, properties) from e

    def find(self, unit: str) -> UnitState | None:
        """Return the state of a unit, None where systemd has none of that name.

        Where it runs, main process and cgroup are left out: this is asked with each change.
        """
        # Reading a property of an unknown unit would make systemd load it; listing does not.
        found = [state for state in self._states(_glob_of(unit), whole=False) if state.unit == unit]
        return found[0] if found else None

    def units(self, pattern: str) -> list[UnitState]:
        """Return all loaded units whose name matches a glob, with all that a state has."""
        return self._states(pattern, whole=True)

    def _states(self, pattern: str, *, whole: bool) -> list[UnitState]:
        try:
            return [self._state(*row, whole=whole) for row in self._rows(pattern)]
        except DBusBaseError as e:
            raise SystemdError(f"cannot list units {pattern}: {_reason(e)}") from e

    def glance(self, pattern: str) -> dict[str, tuple[str, str]]:
        """Return active and sub state of all loaded units whose name matches a glob."""
        try:
            return {unit: (active, sub) for unit, _, active, sub in self._rows(pattern)}
        except DBusBaseError as e:
            raise SystemdError(f"cannot list units {pattern}: {_reason(e)}") from e

    def _rows(self, pattern: str) -> list[tuple[str, str, str, str]]:
        """Return name, description, active and sub state of the loaded units of a glob."""
        args = [(ord("a"), b"s"), CLOSE, (ord("a"), b"s"), *words("s", pattern), CLOSE]
        # Rows: name, description, load state, active state, sub state, …
        return [
            (row[0].decode(), row[1].decode(), row[3].decode(), row[4].decode())
            for row in self._manager("ListUnitsByPatterns", args)
            if row[2] != b"not-found"
        ]

    def listen(self, listener: UnitListener) -> Callable[[], None]:
        """Call `listener` on changes from now on; returns what ends it.

        After the bus was lost and found again the listener is called with "": anything may
        have changed meanwhile.
        """
        with self._lock:
            if self._watch is None:
                try:
                    self._watch = _UnitWatch(self._opener)
                except DBusBaseError as e:
                    raise SystemdError(f"cannot listen to systemd: {_reason(e)}") from e
            return self._watch.add(listener)

    def version(self) -> int:
        """Return systemd's major version."""
        try:
            text = self._get(ROOT, MANAGER, "Version").decode()
        except DBusBaseError as e:
            raise SystemdError(f"cannot ask systemd for its version: {_reason(e)}") from e
        found = re.match(r"v?(\d+)", text)
        if not found:
            raise SystemdError(f"cannot read systemd's version: it says {text!r}")
        return int(found[1])

    def close(self) -> None:
        """End both connections and the thread."""
        with self._lock:
            if self._watch:
                self._watch.close()
                self._watch = None
            self._drop()

    def _on_unit(self, verb: str, unit: str, method: str, args: Sequence[Token]) -> None:
        try:
            self._manager(method, args)
        except DBusBaseError as e:
            if not _NO_UNIT.search(_name(e)):
                raise SystemdError(f"cannot {verb} {unit}: {_reason(e)}") from e

    def _state(
        self, unit: str, description: str, active: str, sub: str, *, whole: bool
    ) -> UnitState:
        path = path_encode(UNITS, unit.encode())
        invocation = bytes(self._get(path, SYSTEMD + b".Unit", "InvocationID"))
        started = exited = main_pid = 0
        control_group, result, ended = "", "success", (0, 0)
        is_service = unit.endswith(".service")
        asked = whole or not is_service or sub != "running"
        if asked and unit.endswith((".service", ".slice", ".scope")):
            kind = SYSTEMD + b"." + unit.rpartition(".")[2].capitalize().encode()
            control_group = self._get(path, kind, "ControlGroup").decode()
        if is_service:
            # One by one: the ten we want come three times faster than all three hundred.
            service = SYSTEMD + b".Service"
            started = self._get(path, service, "ExecMainStartTimestamp")
            main_pid = self._get(path, service, "MainPID") if asked else 0
            if asked and not main_pid:
                result = self._get(path, service, "Result").decode()
                if result == "timeout" and not self._get(
                    path, SYSTEMD + b".Unit", "ActiveEnterTimestamp"
                ):
                    result = "start-timeout"
                code = self._get(path, service, "ExecMainCode")
                ended = (code, self._get(path, service, "ExecMainStatus"))
                exited = self._get(path, service, "ExecMainExitTimestamp")
        return UnitState(
            unit=unit,
            active=active,
            sub=sub,
            result=result,
            invocation_id=invocation.hex(),
            main_pid=main_pid,
            exit_code=ended[1] if ended[0] == os.CLD_EXITED else None,
            exit_signal=_signal(ended[1]) if ended[0] in (os.CLD_KILLED, os.CLD_DUMPED) else None,
            exited_at=exited / 1e6 or None,
            started_at=started / 1e6 or None,
            description=description,
            control_group=control_group,
        )

    def _is_up(self, unit: str, asked_usec: int) -> bool:
        if self.find(unit) is None:
            return False
        path = path_encode(UNITS, unit.encode())
        left = self._get(path, SYSTEMD + b".Unit", "InactiveExitTimestampMonotonic")
        return bool(left >= asked_usec)

    def _manager(
        self, method: str, args: Sequence[Token], on_loss: Callable[[], bool] | None = None
    ) -> Any:
        return self._call(ROOT, MANAGER, method.encode(), args, on_loss)

    def _get(self, path: bytes, interface: bytes, name: str) -> Any:
        args = [(ord("s"), interface), *words("s", name)]
        return self._call(path, PROPERTIES, b"Get", args)

    def _call(
        self,
        path: bytes,
        interface: bytes,
        method: bytes,
        args: Sequence[Token],
        on_loss: Callable[[], bool] | None = None,
    ) -> Any:
        """Call systemd, again where the bus is lost, unless `on_loss` finds the work done."""
        for pause_s in itertools.chain(_PAUSES_S, (None,)):
            try:
                with self._lock:
                    if self._bus is None:
                        self._bus = self._opener()
                    return self._bus.call_method(SYSTEMD, path, interface, method, args).body
            except DBusBaseError as e:
                lost, silent = _is_lost(e), abs(e.errno) == errno.ETIMEDOUT
                if lost:
                    with self._lock:
                        self._drop()
                    time.sleep(pause_s or 0)
                if (lost or silent) and on_loss is not None and on_loss():
                    return None
                if not lost or pause_s is None:
                    raise
        raise AssertionError

    def _drop(self) -> None:
        if self._bus is not None:
            self._bus.close()
            self._bus = None


class _UnitWatch:
    """Listens for units that change, on a connection and in a thread of its own."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._listeners: dict[int, UnitListener] = {}
        self._numbers = itertools.count()
        self._busy: set[str] = set()
        self._due: dict[str, float] = {}
        """Unit whose job is over without a change signal → when its end is reported without one."""
        self._wake_read, self._wake_write = os.pipe()
        try:
            bus = self._subscribed()
        except DBusBaseError:
            self._close_pipe()
            raise
        self._thread = threading.Thread(
            target=self._run, args=(bus,), name="systemd-signals", daemon=True
        )
        self._thread.start()

    def add(self, listener: UnitListener) -> Callable[[], None]:
        number = next(self._numbers)
        self._listeners[number] = listener
        return lambda: self._listeners.pop(number, None) and None

    def close(self) -> None:
        self._listeners.clear()
        os.write(self._wake_write, b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _close_pipe(self) -> None:
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _subscribed(self) -> Bus:
        bus = self._opener()
        try:
            for rule in _MATCHES:
                bus.call_method(BUS, b"/org/freedesktop/DBus", BUS, b"AddMatch", words("s", rule))
            bus.call_method(SYSTEMD, ROOT, MANAGER, b"Subscribe", [])
        except DBusBaseError:
            bus.close()
            raise
        return bus

    def _run(self, bus: Bus) -> None:
        try:
            while self._read(bus):
                log.warning("connection to systemd lost, its signals with it")
                bus.close()
                again = self._reconnected()
                if again is None:
                    return
                bus = again
                self._busy.clear()
                self._due.clear()
                log.info("connected to systemd again")
                self._tell({""})
            bus.close()
        finally:
            self._close_pipe()

    def _reconnected(self) -> Bus | None:
        """Return a new connection, None when asked to end meanwhile."""
        pause_s = 0.1
        while True:
            try:
                return self._subscribed()
            except DBusBaseError:
                if select.select([self._wake_read], [], [], pause_s)[0]:
                    return None
                pause_s = min(pause_s * 2, _BACKOFF_MAX_S)

    def _read(self, bus: Bus) -> bool:
        """Pass signals on until asked to end (False) or the connection dies (True)."""
        fd = bus.get_fd()
        try:
            while True:
                # Replies to our own calls may have pulled signals into the library's queue,
                # so look there first; each `process` takes one message at most.
                changed = {unit for m in _drained(bus) if (unit := self._changed(*m))}
                self._tell(changed | self._overdue())
                ready, _, _ = select.select([fd, self._wake_read], [], [], self._next_s())
                if self._wake_read in ready:
                    return False
        except DBusBaseError:
            return True

    def _changed(self, member: bytes, message: Message) -> str:
        """Return the unit that listeners should read, "" where nothing relevant changed.

        While a unit starts or stops its properties change a dozen times; reading it each time
        would take longer than the start. The end of the job covers them all, and the change that
        follows belongs to it (job_uninstall of systemd 257).
        """
        if member == b"PropertiesChanged":
            # Its body is of no use to us, and taking it apart would cost more than the rest.
            unit = path_decode(message.get_path(), UNITS).decode()
            self._due.pop(unit, None)
            return "" if unit in self._busy else unit
        message.process_reply(False)
        body = cast(list[bytes], message.body)
        removed = member == b"UnitRemoved"
        unit = body[0 if removed else 2].decode()
        if not unit.endswith(".service"):
            return ""
        if member == b"JobNew":
            self._busy.add(unit)
            return ""
        self._busy.discard(unit)
        if removed:
            self._due.pop(unit, None)
            return unit
        self._due[unit] = time.monotonic() + JOB_SETTLES_S
        return ""

    def _overdue(self) -> set[str]:
        """Return the units whose job is over for long enough, and forget them."""
        now = time.monotonic()
        found = {unit for unit, at in self._due.items() if at <= now}
        for unit in found:
            del self._due[unit]
        return found

    def _next_s(self) -> float | None:
        """Return in how many seconds the next unit is overdue, None without any."""
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def _tell(self, units: set[str]) -> None:
        for unit in sorted(units):
            for listener in list(self._listeners.values()):
                try:
                    listener(unit)
                except Exception:
                    # The thread serves all listeners: one that fails must not silence the rest.
                    log.exception("listener of systemd's signals failed", extra={"unit": unit})


def _drained(bus: Bus) -> Iterator[tuple[bytes, Message]]:
    """Yield the signals we asked for, each with its name, until there is nothing more to read."""
    while (message := bus.process()) is not None:
        member = message.get_member()
        if member in _SIGNALS and message.is_signal(_SIGNALS[member], member):
            yield member, message


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raise `SystemdError` where the bus or systemd refuses what is done inside."""
    try:
        yield
    except DBusBaseError as e:
        raise SystemdError(f"{what}: {_reason(e)}") from e


def words(signature: str, *values: str) -> list[Token]:
    return [(ord(kind), value.encode()) for kind, value in zip(signature, values, strict=True)]


def _glob_of(unit: str) -> str:
    """Return the glob that matches this name only (fnmatch(3))."""
    return re.sub(r"([*?\[\\])", r"\\\1", unit)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _name(error: DBusBaseError) -> str:
    """Return the D-Bus name of an error; pystemd turns well-known ones into classes."""
    return _text(error.err_name) or type(error).__name__


def _reason(error: DBusBaseError) -> str:
    return _text(error.err_message) or os.strerror(abs(error.errno))


def _is_lost(error: DBusBaseError) -> bool:
    return abs(error.errno) in _DEAD or bool(_GONE.search(_name(error)))


def _refused(
    attempt: str, error: DBusBaseError, properties: Mapping[str, Property]
) -> SystemdError | Conflict:
    """Return the error for a refused request, with the property that systemd names."""
    reason = _reason(error)
    # A transaction is destructive while the journal of the namespace ends with its last task.
    if re.search("UnitExists|TransactionIsDestructive", _name(error)):
        return Conflict(f"{attempt}: {reason}")
    named = [name for name in properties if re.search(rf"\b{name}\b", reason)]
    for name in sorted(named, key=len, reverse=True)[:1]:
        return SystemdError(f"{attempt} with {name}={properties[name]!r}: {reason}")
    return SystemdError(f"{attempt}: {reason}")
