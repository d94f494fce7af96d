"""The solver's process: a model on standard input, an answer on standard output.

python -m control_plane.rebalancer MEMORY_MIB
python -m control_plane.rebalancer solve FILE SECONDS    # a model in TOML; prints JSON
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from control_plane.rebalancer.core.language import read_model
from control_plane.rebalancer.core.model import Effort, RegionModel
from wire.quantity_fields import TEXT_ENCODING


def main() -> None:
    """Solve one model, with the lowest priority and bounded memory."""
    most = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread would reserve address space
    os.nice(19)
    output = own_output()
    from control_plane.rebalancer.core.solving import solve

    effort, model = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[Effort, RegionModel])
    answer = msgspec.msgpack.encode(solve(model, effort, time.monotonic))
    with output:
        output.write(answer)


def own_output() -> BinaryIO:
    """Return this process's output; libraries' prints go to its error stream from now on."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return output


def solve_file(path: Path, seconds: float) -> None:
    """Print an answer for a model: the optimum of a small one, else found by local search."""
    output = own_output()
    from control_plane.rebalancer.core.exact import VARIABLES_MAX, optimum
    from control_plane.rebalancer.core.neighbourhoods import improved

    model = read_model(path.read_text(TEXT_ENCODING, errors="replace"))
    if len(model.objects) * len(model.containers) <= VARIABLES_MAX:
        answer = optimum(model, time.monotonic, seconds)
    else:
        answer = improved(model, time.monotonic, seconds)
    with output:
        output.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    if sys.argv[1] == "solve":
        solve_file(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
