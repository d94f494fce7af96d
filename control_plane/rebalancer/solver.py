"""Runs the solver as a process of its own, so that it cannot block or crash this one.

The process gets a model on its standard input and writes an answer to its output. It lowers its own
priority and bounds its own memory (`__main__`). One runs at a time.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from control_plane.rebalancer.core.language import PlacementAnswer
from control_plane.rebalancer.core.model import Effort, RegionModel, SolverAnswer
from control_plane.rebalancer.ports import Solve
from wire.errors import Busy

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 60.0
"""Time beyond the search: to start, to read a large model, to compute the bound."""
_WORDS = 400


def solver_process(memory_mib: int) -> Solve:
    """Return a function that solves in a process with at most `memory_mib` of address space."""
    turn = asyncio.Lock()

    async def solve(model: RegionModel, effort: Effort) -> SolverAnswer:
        asked = msgspec.msgpack.encode((effort, model))
        async with turn:
            return await _solved(asked, effort.seconds + GRACE_S, memory_mib)

    return solve


async def solved_file(path: Path, seconds: float) -> PlacementAnswer:
    """Return the solver process's answer for a model in TOML; raises `Busy`."""
    words = ("solve", str(path.resolve()), str(seconds))
    answer = await _answer(words, b"", seconds + GRACE_S)
    return msgspec.json.decode(answer, type=PlacementAnswer)


async def _solved(asked: bytes, within_s: float, memory_mib: int) -> SolverAnswer:
    answer = await _answer((str(memory_mib),), asked, within_s)
    return msgspec.msgpack.decode(answer, type=SolverAnswer)


async def _answer(arguments: tuple[str, ...], asked: bytes, within_s: float) -> bytes:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "control_plane.rebalancer", *arguments),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(within_s):
            answer, errors = await process.communicate(asked)
    except TimeoutError:
        raise Busy(f"the solver did not answer within {within_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        words = errors.decode(errors="replace").strip().rpartition("\n")[2][-_WORDS:]
        raise Busy(
            f"the solver ended with {process.returncode}: {words}",
            hint="it needs numpy and HiGHS: pip install 'twine-cluster[rebalancer]'",
        )
    return answer
