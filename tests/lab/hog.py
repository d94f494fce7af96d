"""Runs in a guest: allocates memory until LEFT MiB are available, reports that, and holds it.

hog.py LEFT
"""

from __future__ import annotations

import mmap
import sys
import time

STEP = 1 << 20


def available() -> int:
    """Return the memory that the kernel reports as available."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    raise SystemExit("the kernel reports no MemAvailable")


def main(left: int) -> None:
    """Allocate piece by piece, so that memory reclaimed for one piece counts before the next."""
    held: list[mmap.mmap] = []
    while available() > left:
        held.append(mmap.mmap(-1, STEP, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        for at in range(0, STEP, mmap.PAGESIZE):
            held[-1][at] = 1
        time.sleep(0.02)
    print(f"held {len(held)}", flush=True)
    while True:
        time.sleep(3600.0)


if __name__ == "__main__":
    main(int(sys.argv[1]) << 20)
