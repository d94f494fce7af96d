"""What every program with an HTTP face tells of its own process."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector


class _Process(ProcessCollector):
    """Needs of /proc the process alone: some units see nothing else there (ProcSubset=pid)."""

    def _boot_time(self) -> float:
        """Return when the host was booted, in seconds since 1970, as /proc/stat has it."""
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def of_process(registry: CollectorRegistry) -> CollectorRegistry:
    """Add memory, descriptors, CPU and start of this process, and the tasks of its event loop."""
    _Process(registry=registry)
    Gauge(
        "twine_loop_tasks",
        "Tasks of the event loop: endless growth here is a leak.",
        registry=registry,
    ).set_function(lambda: len(asyncio.all_tasks()))
    return registry
