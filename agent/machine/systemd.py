"""Starts, stops, changes and reads units of the host's systemd over D-Bus.

Each instance has one connection for calls (`systemd_calls.py`), and one for signals, which a
separate thread reads (`unit_watch.py`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence

from pystemd.dbusexc import DBusBaseError
from pystemd.dbuslib import path_encode

from agent.machine import Property, UnitListener, UnitState, signal_name
from agent.machine.bus import open_bus
from agent.machine.systemd_calls import (
    MANAGER,
    ROOT,
    SYSTEMD,
    UNITS,
    Opener,
    SystemdCalls,
    name_of,
    reason_of,
    string_tokens,
    translating_errors,
)
from agent.machine.unit_properties import CLOSE, Token, encode
from agent.machine.unit_watch import UnitWatch
from wire.errors import Conflict, SystemdError

_NO_UNIT = re.compile("NoSuchUnit|UnknownObject|NoSuchProcess")


class HostSystemd(SystemdCalls):
    """Units of the host. Needs root. May be called from any thread."""

    def __init__(self, opener: Opener = open_bus) -> None:
        super().__init__(opener)
        self._watch: UnitWatch | None = None

    def start_transient(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Queue the start of a transient unit; `find` and the listeners report the outcome.

        If the bus is lost meanwhile, systemd may or may not have received the request. A unit
        that exists then and is younger than the request is the requested one.
        """
        args = [*string_tokens("s", unit), *string_tokens("s", "fail"), *encode(properties)]
        args += [(ord("a"), b"(sa(sv))"), CLOSE]
        asked_usec = time.monotonic_ns() // 1000
        try:
            self._manager("StartTransientUnit", args, on_loss=lambda: self._is_up(unit, asked_usec))
        except DBusBaseError as e:
            raise _refusal_error(f"cannot start {unit}", e, properties) from e

    def stop(self, unit: str) -> None:
        """Queue the stop of a unit; does nothing for an unknown unit."""
        self._on_unit("stop", unit, "StopUnit", [*string_tokens("ss", unit, "replace")])

    def kill(self, unit: str, signal: int) -> None:
        """Signal every process of a unit; does nothing for an unknown unit."""
        args = [*string_tokens("ss", unit, "all"), (ord("i"), signal)]
        self._on_unit(f"send signal {signal} to", unit, "KillUnit", args)

    def reset_failed(self, unit: str) -> None:
        """Make systemd forget a failed unit; does nothing for an unknown unit."""
        self._on_unit("reset", unit, "ResetFailedUnit", [*string_tokens("s", unit)])

    def set_properties(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Change properties of a running unit until the next boot."""
        args = [*string_tokens("s", unit), (ord("b"), True), *encode(properties)]
        try:
            self._manager("SetUnitProperties", args)
        except DBusBaseError as e:
            raise _refusal_error(f"cannot change {unit}", e, properties) from e

    def find(self, unit: str) -> UnitState | None:
        """Return the state of a unit, None if systemd has no unit of that name.

        For a running unit, main process and cgroup are left out: this is called for each change.
        """
        # Listing, because reading a property of an unknown unit would make systemd load it.
        states = [
            state for state in self._states(_glob_of(unit), whole=False) if state.unit == unit
        ]
        return states[0] if states else None

    def units(self, pattern: str) -> list[UnitState]:
        """Return all loaded units whose name matches a glob, with all fields of their states."""
        return self._states(pattern, whole=True)

    def _states(self, pattern: str, *, whole: bool) -> list[UnitState]:
        with translating_errors(f"cannot list units {pattern}"):
            return [self._state(*row, whole=whole) for row in self._rows(pattern)]

    def unit_states(self, pattern: str) -> dict[str, tuple[str, str]]:
        """Return active and sub state of all loaded units whose name matches a glob."""
        with translating_errors(f"cannot list units {pattern}"):
            return {unit: (active, sub) for unit, _, active, sub in self._rows(pattern)}

    def _rows(self, pattern: str) -> list[tuple[str, str, str, str]]:
        """Return name, description, active and sub state of the loaded units of a glob."""
        args = [(ord("a"), b"s"), CLOSE, (ord("a"), b"s"), *string_tokens("s", pattern), CLOSE]
        # Rows: name, description, load state, active state, sub state, …
        return [
            (row[0].decode(), row[1].decode(), row[3].decode(), row[4].decode())
            for row in self._manager("ListUnitsByPatterns", args)
            if row[2] != b"not-found"
        ]

    def listen(self, listener: UnitListener) -> Callable[[], None]:
        """Call `listener` on changes from now on; returns a function that ends this.

        After a reconnection to the bus the listener is called with "": anything may have changed
        meanwhile.
        """
        with self._lock:
            if self._watch is None:
                with translating_errors("cannot subscribe to systemd"):
                    self._watch = UnitWatch(self._opener)
            return self._watch.add(listener)

    def version(self) -> int:
        """Return systemd's major version."""
        with translating_errors("cannot ask systemd for its version"):
            text = self._get(ROOT, MANAGER, "Version").decode()
        match = re.match(r"v?(\d+)", text)
        if not match:
            raise SystemdError(f"cannot parse systemd's version: {text!r}")
        return int(match[1])

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
            if not _NO_UNIT.search(name_of(e)):
                raise SystemdError(f"cannot {verb} {unit}: {reason_of(e)}") from e

    def _state(
        self, unit: str, description: str, active: str, sub: str, *, whole: bool
    ) -> UnitState:
        path = path_encode(UNITS, unit.encode())
        about, service = SYSTEMD + b".Unit", SYSTEMD + b".Service"
        invocation = bytes(self._get(path, about, "InvocationID"))
        started = exited = main_pid = code = status = 0
        control_group, result = "", "success"
        is_service = unit.endswith(".service")
        asked = whole or not is_service or sub != "running"
        if asked and unit.endswith((".service", ".slice", ".scope")):
            kind = SYSTEMD + b"." + unit.rpartition(".")[2].capitalize().encode()
            control_group = self._get(path, kind, "ControlGroup").decode()
        if is_service:
            # One by one: reading ten properties is three times faster than all three hundred.
            started = self._get(path, service, "ExecMainStartTimestamp")
            main_pid = self._get(path, service, "MainPID") if asked else 0
            if asked and not main_pid:
                result = self._get(path, service, "Result").decode()
                if result == "timeout" and not self._get(path, about, "ActiveEnterTimestamp"):
                    result = "start-timeout"
                code = self._get(path, service, "ExecMainCode")
                status = self._get(path, service, "ExecMainStatus")
                exited = self._get(path, service, "ExecMainExitTimestamp")
        killed = code in (os.CLD_KILLED, os.CLD_DUMPED)
        return UnitState(
            unit=unit,
            active=active,
            sub=sub,
            result=result,
            invocation_id=invocation.hex(),
            main_pid=main_pid,
            exit_code=status if code == os.CLD_EXITED else None,
            exit_signal=signal_name(status) if killed else None,
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


def _glob_of(unit: str) -> str:
    """Return the glob that matches this name only (fnmatch(3))."""
    return re.sub(r"([*?\[\\])", r"\\\1", unit)


def _refusal_error(
    attempt: str, error: DBusBaseError, properties: Mapping[str, Property]
) -> SystemdError | Conflict:
    """Return the error for a refused request, with the property that systemd names."""
    reason = reason_of(error)
    # A transaction is destructive while the journal of a namespace stops after its last task.
    if re.search("UnitExists|TransactionIsDestructive", name_of(error)):
        return Conflict(f"{attempt}: {reason}")
    named = [name for name in properties if re.search(rf"\b{name}\b", reason)]
    for name in sorted(named, key=len, reverse=True)[:1]:
        return SystemdError(f"{attempt} with {name}={properties[name]!r}: {reason}")
    return SystemdError(f"{attempt}: {reason}")
