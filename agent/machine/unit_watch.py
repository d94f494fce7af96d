"""Receives systemd's signals about changed units, in a thread with its own D-Bus connection."""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

from pystemd.dbusexc import DBusBaseError
from pystemd.dbuslib import path_decode

from agent.machine import UnitListener
from agent.machine.bus import Bus, Message
from agent.machine.systemd_calls import (
    BUS,
    MANAGER,
    PROPERTIES,
    ROOT,
    SYSTEMD,
    UNITS,
    Opener,
    string_tokens,
)

log = logging.getLogger(__name__)

_BACKOFF_MAX_S = 5.0
_MATCHES = (
    "type='signal',sender='org.freedesktop.systemd1',"
    "path_namespace='/org/freedesktop/systemd1/unit',"
    "interface='org.freedesktop.DBus.Properties',member='PropertiesChanged',"
    "arg0='org.freedesktop.systemd1.Service'",
    *(
        "type='signal',sender='org.freedesktop.systemd1',"
        f"interface='org.freedesktop.systemd1.Manager',member='{member}'"
        for member in ("JobNew", "JobRemoved", "UnitRemoved")
    ),
)
"""Match rules: the bus drops other signals before they are copied to us. A start also changes a
dozen slices, mounts and targets. Only services have properties of `Service`, and systemd sends them
just before those of `Unit` (bus_unit_send_change_signal of systemd 257)."""
JOB_SETTLES_S = 0.05
"""Seconds to wait after the end of a unit's job for the unit's own change, which follows at once.
Otherwise a listener would read the unit twice."""

_SIGNALS = {
    b"PropertiesChanged": PROPERTIES,
    b"JobNew": MANAGER,
    b"JobRemoved": MANAGER,
    b"UnitRemoved": MANAGER,
}
"""Subscribed signals, with their interfaces."""


class UnitWatch:
    """Calls listeners when units change; has its own connection and thread."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._listeners: dict[int, UnitListener] = {}
        self._numbers = itertools.count()
        self._busy: set[str] = set()
        self._due: dict[str, float] = {}
        """Unit whose job ended without a change signal → when listeners are called anyway."""
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
                bus.call_method(
                    BUS, b"/org/freedesktop/DBus", BUS, b"AddMatch", string_tokens("s", rule)
                )
            bus.call_method(SYSTEMD, ROOT, MANAGER, b"Subscribe", [])
        except DBusBaseError:
            bus.close()
            raise
        return bus

    def _run(self, bus: Bus) -> None:
        try:
            while self._read(bus):
                log.warning("connection to systemd lost, and its signals with it")
                bus.close()
                again = self._reconnected()
                if again is None:
                    return
                bus = again
                self._busy.clear()
                self._due.clear()
                log.info("connected to systemd again")
                self._notify({""})
            bus.close()
        finally:
            self._close_pipe()

    def _reconnected(self) -> Bus | None:
        """Return a new connection, None if `close` was called meanwhile."""
        pause_s = 0.1
        while True:
            try:
                return self._subscribed()
            except DBusBaseError:
                if select.select([self._wake_read], [], [], pause_s)[0]:
                    return None
                pause_s = min(pause_s * 2, _BACKOFF_MAX_S)

    def _read(self, bus: Bus) -> bool:
        """Process signals until `close` (returns False) or a lost connection (True)."""
        fd = bus.get_fd()
        try:
            while True:
                # The library's queue comes first: replies to our own calls may have brought
                # signals into it. Each `process` takes at most one message.
                changed = {unit for m in _queued_signals(bus) if (unit := self._changed(*m))}
                self._notify(changed | self._overdue())
                ready, _, _ = select.select([fd, self._wake_read], [], [], self._next_s())
                if self._wake_read in ready:
                    return False
        except DBusBaseError:
            return True

    def _changed(self, member: bytes, message: Message) -> str:
        """Return the unit that listeners should read, "" if nothing relevant changed.

        While a unit starts or stops its properties change a dozen times. Reading it each time
        would take longer than the start. So these changes are skipped, and the unit is reported
        at the end of its job (job_uninstall of systemd 257).
        """
        if member == b"PropertiesChanged":
            # The body is not needed; decoding it would cost more than the rest.
            unit = path_decode(message.get_path(), UNITS).decode()
            self._due.pop(unit, None)
            return "" if unit in self._busy else unit
        message.process_reply()
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
        """Return the units whose job ended `JOB_SETTLES_S` ago, and remove them from `_due`."""
        now = time.monotonic()
        found = {unit for unit, at in self._due.items() if at <= now}
        for unit in found:
            del self._due[unit]
        return found

    def _next_s(self) -> float | None:
        """Return the seconds until the next unit is due, None if no unit waits."""
        return max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None

    def _notify(self, units: set[str]) -> None:
        for unit in sorted(units):
            for listener in list(self._listeners.values()):
                try:
                    listener(unit)
                except Exception:
                    # The thread serves all listeners: a failing one must not stop the others.
                    log.exception("listener for systemd's signals failed", extra={"unit": unit})


def _queued_signals(bus: Bus) -> Iterator[tuple[bytes, Message]]:
    """Yield the received signals with their names, until the queue is empty."""
    while (message := bus.process()) is not None:
        member = message.get_member()
        if member in _SIGNALS and message.is_signal(_SIGNALS[member], member):
            yield member, message
