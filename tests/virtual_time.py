"""An event loop whose clock jumps to the next timer: hours of scheduling in milliseconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from control_plane.runtime.runtime import SteppedRuntime

T = TypeVar("T")
EPOCH_S = 1_800_000_000.0
"""Wall-clock time when the loop's clock shows 0."""


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen: every task waits for another")
        self.now += max(timeout, 0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def clock() -> float:
    return EPOCH_S + asyncio.get_running_loop().time()


RUNTIME = SteppedRuntime(clock, seed=0)
"""Runtime that actors get in tests."""
