"""Metrics of the own process, for every program that serves HTTP."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector


class _Process(ProcessCollector):
    """Reads only this process' files in /proc: some units see no others (ProcSubset=pid)."""

    def _boot_time(self) -> float:
        """Return when the host was booted, in seconds since 1970 (elsewhere from /proc/stat)."""
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def add_process_metrics(registry: CollectorRegistry) -> CollectorRegistry:
    """Add memory, descriptors, CPU and start of this process, and the tasks of its event loop."""
    _Process(registry=registry)
    Gauge(
        "twine_loop_tasks",
        "Tasks of the event loop: endless growth here is a leak.",
        registry=registry,
    ).set_function(lambda: len(asyncio.all_tasks()))
    return registry
