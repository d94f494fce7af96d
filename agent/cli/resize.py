"""The command that changes what a running task may use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from agent import api
from agent.cli.program import call
from agent.wire import options


@click.command()
@click.argument("name")
@click.option("--memory", "memory_max_bytes", type=options.size(), help="48MiB, 1.5GiB, …")
@click.option("--memory-high", "memory_high_bytes", type=options.size())
@click.option("--memory-low", "memory_low_bytes", type=options.size())
@click.option("--memory-min", "memory_min_bytes", type=options.size())
@click.option("--swap", "swap_max_bytes", type=options.size())
@click.option("--cores", "cpu_max_cores", type=options.cores(), help="Most CPUs: 0.5, 2, 500m.")
@click.option("--cpu-weight", type=click.IntRange(1, 10_000))
@click.option("--io-weight", type=click.IntRange(1, 10_000))
@click.option("--exclusive-cpus", type=click.IntRange(1, 4096), help="Of a task that has some.")
@click.option("--hugepages-2mib", type=click.IntRange(0, 1 << 24), help="Of a task that has some.")
@click.option("--hugepages-1gib", type=click.IntRange(0, 1 << 24), help="Of a task that has some.")
@click.option("--processes", "tasks_max", type=click.IntRange(1, 4_194_304))
@click.pass_obj
def resize(config_path: Path | None, /, name: str, **asked: Any) -> None:
    """Change what task NAME may use, while it runs; what is not named stays as it is."""
    given = {field: value for field, value in asked.items() if value is not None}
    if not given:
        raise click.UsageError("say what is to change, for instance --memory 64MiB")
    whole = {k: int(v) if k.endswith("_bytes") else v for k, v in given.items()}
    status = call(config_path, lambda c: c.resize_task(name, api.Resize(**whole)))
    click.echo(f"{status.task_id}: generation {status.generation}, {status.state}")
