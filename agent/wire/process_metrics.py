"""What every program with an HTTP face tells of its own process."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector


def of_process(registry: CollectorRegistry) -> CollectorRegistry:
    """Add memory, descriptors, CPU and start of this process, and the tasks of its event loop."""
    ProcessCollector(registry=registry)
    Gauge(
        "twine_loop_tasks",
        "Tasks of the event loop: what grows without end here is a leak.",
        registry=registry,
    ).set_function(lambda: len(asyncio.all_tasks()))
    return registry
