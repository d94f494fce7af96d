"""Run in a guest: takes memory until LEFT MiB of the host's are left, says so, and holds it.

hog.py LEFT
"""

from __future__ import annotations

import mmap
import sys
import time

STEP = 1 << 20


def available() -> int:
    """Return what the kernel says that it could still give."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    raise SystemExit("the kernel tells no MemAvailable")


def main(left: int) -> None:
    """Take it piece by piece: what is reclaimed for one is seen before the next."""
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
