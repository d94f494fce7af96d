"""Calls to systemd over D-Bus, which are repeated when the bus was lost.

pystemd's generated proxies are not used. They introspect each unit and build classes for it, which
makes reading a unit as slow as starting it. This module also has systemd's names on the bus, and
the classification of its errors.
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

_CONNECTION_ERRORS = frozenset(
    {errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE, errno.ESHUTDOWN, errno.ECONNREFUSED}
)
_BUS_RESTART_ERRORS = re.compile("Disconnected|NoReply|ServiceUnknown|NameHasNoOwner|NoServer")
"""Errors after a restart of the bus, and before systemd has connected to it again."""
_PAUSES_S = (0.0, 0.1, 0.4, 1.0, 2.0)
"""Pauses between attempts on a lost bus. `systemctl restart dbus` is faster than their sum."""

Opener = Callable[[], Bus]


class SystemdCalls:
    """One connection for calls, behind a lock. It is opened with the first call and reopened when
    it is lost.
    """

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._bus: Bus | None = None
        self._lock = threading.Lock()

    def _manager(
        self, method: str, args: Sequence[Token], on_loss: Callable[[], bool] | None = None
    ) -> Any:
        return self._call(ROOT, MANAGER, method.encode(), args, on_loss)

    def _get(self, path: bytes, interface: bytes, name: str) -> Any:
        args = [(ord("s"), interface), *string_tokens("s", name)]
        return self._call(path, PROPERTIES, b"Get", args)

    def _call(
        self,
        path: bytes,
        interface: bytes,
        method: bytes,
        args: Sequence[Token],
        on_loss: Callable[[], bool] | None = None,
    ) -> Any:
        """Call systemd. Repeat the call if the bus is lost, unless `on_loss` finds it done."""
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
def translating_errors(what: str) -> Iterator[None]:
    """Turn errors of the bus or of systemd inside the block into `SystemdError`."""
    try:
        yield
    except DBusBaseError as e:
        raise SystemdError(f"{what}: {reason_of(e)}") from e


def string_tokens(signature: str, *values: str) -> list[Token]:
    """Return the pieces of a message for texts; `signature` has the type code of each."""
    return [(ord(kind), value.encode()) for kind, value in zip(signature, values, strict=True)]


def _text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def name_of(error: DBusBaseError) -> str:
    """Return the D-Bus name of an error; pystemd turns well-known ones into classes."""
    return _text(error.err_name) or type(error).__name__


def reason_of(error: DBusBaseError) -> str:
    return _text(error.err_message) or os.strerror(abs(error.errno))


def _is_lost(error: DBusBaseError) -> bool:
    is_closed = abs(error.errno) in _CONNECTION_ERRORS
    return is_closed or bool(_BUS_RESTART_ERRORS.search(name_of(error)))
