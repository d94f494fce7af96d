"""Runs the solver in a separate process, so that it cannot block or crash this one.

The process reads a model from its standard input and writes an answer to its output. It lowers its
own priority and bounds its own memory (`__main__`). One solver runs at a time.
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
"""Time in addition to the search: to start, to read a large model, and to compute the bound."""
_ERROR_CHARS = 400


def solver_process(memory_mib: int) -> Solve:
    """Return a function that solves in a process with at most `memory_mib` of address space."""
    one_at_a_time = asyncio.Lock()

    async def solve(model: RegionModel, effort: Effort) -> SolverAnswer:
        request = msgspec.msgpack.encode((effort, model))
        async with one_at_a_time:
            return await _solved(request, effort.seconds + GRACE_S, memory_mib)

    return solve


async def solved_file(path: Path, seconds: float) -> PlacementAnswer:
    """Return the solver process's answer for a model in TOML; raises `Busy`."""
    arguments = ("solve", str(path.resolve()), str(seconds))
    answer = await _run_process(arguments, b"", seconds + GRACE_S)
    return msgspec.json.decode(answer, type=PlacementAnswer)


async def _solved(request: bytes, within_s: float, memory_mib: int) -> SolverAnswer:
    answer = await _run_process((str(memory_mib),), request, within_s)
    return msgspec.msgpack.decode(answer, type=SolverAnswer)


async def _run_process(arguments: tuple[str, ...], request: bytes, within_s: float) -> bytes:
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "control_plane.rebalancer", *arguments),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as e:  # such as too many processes or open files
        raise Busy(f"cannot start the solver: {e}") from e
    try:
        async with asyncio.timeout(within_s):
            answer, errors = await process.communicate(request)
    except TimeoutError:
        raise Busy(f"the solver did not answer within {within_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2][-_ERROR_CHARS:]
        raise Busy(
            f"the solver ended with {process.returncode}: {last_line}",
            hint="it needs numpy and HiGHS: pip install 'twine-cluster[rebalancer]'",
        )
    return answer
