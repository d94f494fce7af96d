"""Calls to systemd over D-Bus, made again where the bus was lost.

Works below pystemd's generated proxies: those introspect and build classes for each unit,
which makes reading one unit cost as much as its start. The names that systemd has on the bus
and the words of its errors are here, too.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pystemd.dbusexc import DBusBaseError

from agent.machine.bus import Bus
from agent.machine.unit_properties import Token
from wire.errors import SystemdError

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
_PAUSES_S = (0.0, 0.1, 0.4, 1.0, 2.0)
"""Between attempts on a dead bus. `systemctl restart dbus` is over in that time."""

Opener = Callable[[], Bus]


class SystemdCalls:
    """One connection for calls, behind a lock, that is made again when it is lost."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._bus: Bus | None = None
        self._lock = threading.Lock()

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


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raise `SystemdError` where the bus or systemd refuses what is done inside."""
    try:
        yield
    except DBusBaseError as e:
        raise SystemdError(f"{what}: {reason_of(e)}") from e


def words(signature: str, *values: str) -> list[Token]:
    return [(ord(kind), value.encode()) for kind, value in zip(signature, values, strict=True)]


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def name_of(error: DBusBaseError) -> str:
    """Return the D-Bus name of an error; pystemd turns well-known ones into classes."""
    return _text(error.err_name) or type(error).__name__


def reason_of(error: DBusBaseError) -> str:
    return _text(error.err_message) or os.strerror(abs(error.errno))


def _is_lost(error: DBusBaseError) -> bool:
    return abs(error.errno) in _DEAD or bool(_GONE.search(name_of(error)))
