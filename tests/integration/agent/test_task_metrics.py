"""Prometheus accepts a scrape of an agent with tasks."""

from __future__ import annotations

import subprocess

import pytest
from builders import a_spec
from prometheus_client import CollectorRegistry, generate_latest

from agent.api import Exit, Health, TaskState, TaskStatus
from agent.host.metrics import ScrapedValues, StaticCollector, families
from agent.machine import Usage
from agent.usage import TaskUsage, Usages


@pytest.mark.behaviour("AG10")
def test_promtool_accepts_the_metrics_of_tasks() -> None:
    """Names, units and help of every metric follow the rules of Prometheus."""
    end = Exit(result="oom-kill", signal="SIGKILL", at=5.0)
    status = TaskStatus(
        task_id="web",
        job="shop",
        generation=1,
        epoch=0,
        state=TaskState.RUNNING,
        health=Health.HEALTHY,
        image="sha256:1",
        restarts=2,
        last_exit=end,
    )
    usages = Usages(at_boot_s=1.0, tasks=[TaskUsage(task_id="web", cpu_s=1.5, oom_kills=1)])
    groups = {"host": Usage(cpu_s=9.0, memory_pressure=0.5), "tasks": Usage(memory_bytes=1)}
    probes = {("http", True): 3, ("exec", False): 1}
    seen = ScrapedValues([status], {"web": a_spec()}, usages, groups, 1, probes)
    registry = CollectorRegistry()
    registry.register(StaticCollector(list(families(seen))))
    text = generate_latest(registry)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
    )

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    assert b'twine_task_restarts_total{job="shop",task="web"} 2.0' in text
    last = b'twine_task_last_exit_timestamp_seconds{job="shop",result="oom-kill",task="web"} 5.0'
    assert last in text
    assert b'twine_host_pressure_ratio{of="host",resource="memory"} 0.5' in text
