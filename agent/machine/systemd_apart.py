"""The service manager behind a process of its own, so that its slowness is not ours.

While pystemd waits for an answer it holds the interpreter's lock. On a busy host PID 1 answers
after seconds; done in the agent itself, such a call would stop its API, its probes and its
watchdog. Here the agent waits on a socket, which holds nothing. The helper dies with the agent,
and is started again where it died alone.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from agent.errors import SystemdError, TwineError
from agent.machine import Property, Systemd, UnitListener, UnitState

_LENGTH = struct.Struct("!I")
_METHODS = frozenset({"start_transient", "stop", "kill", "reset_failed"})
_METHODS |= {"set_properties", "find", "units", "glance", "version"}
PATIENCE_S = 90.0
"""More than the helper itself takes for a call on a dead bus (25 s, five times at most)."""
RESTART_S = 0.5

Spawn = Callable[[socket.socket, socket.socket], Callable[[], None]]
"""Starts a helper on the far ends of calls and signals; returns what ends it."""


def spawn_helper(calls: socket.socket, signals: socket.socket) -> Callable[[], None]:
    """Start the helper as a process."""
    for end in (calls, signals):
        os.set_inheritable(end.fileno(), True)
    argv = [sys.executable, "-I", "-m", __name__, str(calls.fileno()), str(signals.fileno())]
    pid = os.posix_spawn(argv[0], argv, os.environ)
    process = os.pidfd_open(pid)

    def reap() -> None:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)
        os.waitpid(pid, 0)

    return reap


class ApartSystemd:
    """Units of the host, through a helper. May be called from any thread."""

    def __init__(self, spawn: Spawn = spawn_helper) -> None:
        """Start nothing yet."""
        self._spawn = spawn
        self._lock = threading.Lock()
        self._calls: socket.socket | None = None
        self._end_helper: Callable[[], None] = lambda: None
        self._listeners: dict[int, UnitListener] = {}
        self._number = 0

    def start_transient(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Queue the start of a transient unit; `find` and the listeners tell what came of it."""
        self._call("start_transient", unit, dict(properties))

    def stop(self, unit: str) -> None:
        """Queue the stop of a unit; one that is not there is no error."""
        self._call("stop", unit)

    def kill(self, unit: str, signal: int) -> None:
        """Signal every process of a unit; one that is not there is no error."""
        self._call("kill", unit, signal)

    def reset_failed(self, unit: str) -> None:
        """Let systemd forget a failed unit; one that is not there is no error."""
        self._call("reset_failed", unit)

    def set_properties(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Change properties of a running unit until the next boot."""
        self._call("set_properties", unit, dict(properties))

    def find(self, unit: str) -> UnitState | None:
        """Return the state of a unit, None where systemd knows none of that name."""
        found: UnitState | None = self._call("find", unit)
        return found

    def units(self, pattern: str) -> list[UnitState]:
        """Return all loaded units whose name matches a glob."""
        found: list[UnitState] = self._call("units", pattern)
        return found

    def glance(self, pattern: str) -> dict[str, tuple[str, str]]:
        """Return active and sub state of all loaded units whose name matches a glob."""
        found: dict[str, tuple[str, str]] = self._call("glance", pattern)
        return found

    def version(self) -> int:
        """Return systemd's major version."""
        found: int = self._call("version")
        return found

    def listen(self, listener: UnitListener) -> Callable[[], None]:
        """Call `listener` on changes from now on; returns what ends it.

        After a helper died the listener is called with "": anything may have changed.
        """
        with self._lock:
            self._number += 1
            number = self._number
            self._listeners[number] = listener
            self._ensure()
        return lambda: self._listeners.pop(number, None) and None

    def close(self) -> None:
        """End the helper."""
        self._listeners.clear()
        with self._lock:
            self._drop()

    def _call(self, method: str, *args: object) -> Any:
        with self._lock:
            calls = self._ensure()
            try:
                send(calls, (method, args))
                good, answer = receive(calls)
            except (OSError, EOFError) as e:
                self._drop()
                raise SystemdError(
                    f"cannot {method.replace('_', ' ')}: the helper that speaks to systemd died",
                    hint="it is started again with the next call",
                ) from e
        if not good:
            raise answer
        return answer

    def _ensure(self) -> socket.socket:
        """Return the near end for calls, of a new helper where there is none."""
        if self._calls is None:
            calls, far_calls = socket.socketpair()
            signals, far_signals = socket.socketpair()
            self._end_helper = self._spawn(far_calls, far_signals)
            far_calls.close()
            far_signals.close()
            calls.settimeout(PATIENCE_S)
            self._calls = calls
            threading.Thread(
                target=self._hear, args=(signals, calls), name="systemd-signals", daemon=True
            ).start()
        return self._calls

    def _drop(self) -> None:
        if self._calls is not None:
            self._calls.close()
            self._calls = None
            self._end_helper()

    def _hear(self, signals: socket.socket, calls: socket.socket) -> None:
        """Pass on what one helper says until it dies; then see to another, while one is wanted."""
        with signals:
            while True:
                try:
                    self._tell(receive(signals))
                except (OSError, EOFError):
                    break
        with self._lock:
            if self._calls is calls:
                self._drop()
        if self._listeners:
            threading.Event().wait(RESTART_S)
            with self._lock:
                if self._listeners:
                    self._ensure()
            self._tell("")

    def _tell(self, unit: str) -> None:
        for listener in list(self._listeners.values()):
            listener(unit)


def send(to: socket.socket, value: object) -> None:
    """Send one value."""
    data = pickle.dumps(value)
    to.sendall(_LENGTH.pack(len(data)) + data)


def receive(source: socket.socket) -> Any:
    """Return the next value; raises `EOFError` at the end."""
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    return pickle.loads(_exactly(source, length))


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def serve(systemd: Systemd, calls: socket.socket, signals: socket.socket) -> None:
    """Answer calls until the other side is gone."""

    def heard(unit: str) -> None:
        try:
            send(signals, unit)
        except OSError:
            calls.close()

    end = systemd.listen(heard)
    try:
        while True:
            method, args = receive(calls)
            send(calls, _answer(systemd, method, args))
    except (EOFError, OSError):
        end()


def _answer(systemd: Systemd, method: str, args: tuple[object, ...]) -> tuple[bool, object]:
    if method not in _METHODS:
        return False, SystemdError(f"the helper has no call {method}")
    try:
        return True, getattr(systemd, method)(*args)
    except TwineError as e:
        return False, e


def main() -> None:
    """Serve on the two sockets named by their file descriptors."""
    from agent.machine.systemd import HostSystemd

    calls, signals = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    serve(HostSystemd(), calls, signals)


if __name__ == "__main__":
    main()
