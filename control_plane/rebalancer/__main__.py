"""The solver's process: a model on standard input, an answer on standard output.

python -m control_plane.rebalancer MEMORY_MIB
"""

from __future__ import annotations

import os
import resource
import sys
import time

import msgspec

from control_plane.rebalancer.core.model import Effort, RegionModel


def main() -> None:
    """Solve one model, with the lowest priority and bounded memory."""
    most = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread would reserve address space
    os.nice(19)
    output = os.dup(1)
    os.dup2(2, 1)  # libraries that print do not print into the answer
    from control_plane.rebalancer.core.solving import solve

    effort, model = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[Effort, RegionModel])
    answer = msgspec.msgpack.encode(solve(model, effort, time.monotonic))
    with os.fdopen(output, "wb") as out:
        out.write(answer)


if __name__ == "__main__":
    main()
