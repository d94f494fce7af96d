"""Computing time of the event loop, by the name of the actor that used it."""

from __future__ import annotations

from collections.abc import Coroutine
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")


class Meter:
    """Seconds of the loop by actor, as `busy_s`, and each actor's longest step, `longest_s`.

    Its clock needs no system call: every step is measured, and under a sandboxed kernel a system
    call costs as much as a step. On a busy host the times include those of other processes.

    A step is the work of an actor between two awaits; no other actor runs meanwhile.
    """

    def __init__(self) -> None:
        self.busy_s: dict[str, float] = {}
        self.longest_s: dict[str, float] = {}

    def reset(self) -> None:
        """Begin again at zero."""
        self.busy_s.clear()
        self.longest_s.clear()

    def add_step(self, name: str, seconds: float) -> None:
        """Count one step."""
        self.busy_s[name] = self.busy_s.get(name, 0.0) + seconds
        if seconds > self.longest_s.get(name, 0.0):
            self.longest_s[name] = seconds

    def metered(self, name: str, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return the same work with each step counted (1 µs a step)."""
        return _Metered(self, name, work)


class _Metered(Coroutine[Any, Any, T]):
    __slots__ = ("_meter", "_name", "_work")

    def __init__(self, meter: Meter, name: str, work: Coroutine[Any, Any, T]) -> None:
        self._meter, self._name, self._work = meter, name, work

    def send(self, value: Any) -> Any:
        began = perf_counter()
        try:
            return self._work.send(value)
        finally:
            self._meter.add_step(self._name, perf_counter() - began)

    def throw(self, *error: Any) -> Any:
        began = perf_counter()
        try:
            return self._work.throw(*error)
        finally:
            self._meter.add_step(self._name, perf_counter() - began)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()
