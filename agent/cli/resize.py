"""The command that changes the limits of a running task."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec

from agent import api
from agent.cli.program import call
from wire import options


class _Io(click.ParamType[api.IoLimit]):
    """Limits of one device, with the same names as in a task file."""

    name = "limits"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> api.IoLimit:
        """Return the limits in a text such as `device=/dev/vda,write_bytes_per_s=10MiB`."""
        if isinstance(value, api.IoLimit):
            return value
        fields, limits = api.IoLimit.__struct_fields__, dict[str, Any]()
        for part in value.split(","):
            key, _, text = part.partition("=")
            key, text = key.strip(), text.strip()
            if key not in fields or not text:
                self.fail(
                    f"{part!r} is not one of {', '.join(f'{f}=…' for f in fields)}", param, ctx
                )
            if key in limits:
                self.fail(f"{key} is given twice", param, ctx)
            limits[key] = text if key == "device" else self._rate(key, text, param, ctx)
        try:
            return msgspec.convert(limits, api.IoLimit)
        except msgspec.ValidationError as e:
            self.fail(f"{value!r}: {e}", param, ctx)

    def _rate(
        self, key: str, text: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return a number, which may be a size if the limit is in bytes."""
        with suppress(ValueError):
            return int(text)
        if "_bytes_" in key:
            return int(options.size().convert(text, param, ctx))
        self.fail(f"{key}={text}: a whole number is required", param, ctx)


@click.command()
@click.argument("name")
@click.option("--memory", "memory_max_bytes", type=options.size(), help="48MiB, 1.5GiB, …")
@click.option("--memory-high", "memory_high_bytes", type=options.size())
@click.option("--memory-low", "memory_low_bytes", type=options.size())
@click.option("--memory-min", "memory_min_bytes", type=options.size())
@click.option("--swap", "swap_max_bytes", type=options.size())
@click.option("--cores", "cpu_max_cores", type=options.cores(), help="CPU limit: 0.5, 2, 500m.")
@click.option("--cpu-weight", type=click.IntRange(1, 10_000))
@click.option("--io-weight", type=click.IntRange(1, 10_000))
@click.option(
    "--io",
    type=_Io(),
    multiple=True,
    help="All limits of one device, named as in a file: "
    "device=/dev/vda,write_bytes_per_s=10MiB. The device alone removes them. Repeat for "
    "each device.",
)
@click.option("--exclusive-cpus", type=click.IntRange(1, 4096), help="Of a task that has some.")
@click.option("--hugepages-2mib", type=click.IntRange(0, 1 << 24), help="Of a task that has some.")
@click.option("--hugepages-1gib", type=click.IntRange(0, 1 << 24), help="Of a task that has some.")
@click.option("--processes", "tasks_max", type=click.IntRange(1, 4_194_304))
@click.pass_obj
def resize(config_path: Path | None, /, name: str, **asked: Any) -> None:
    """Change the limits of task NAME while it runs; limits that are not named stay."""
    asked["io"] = list(asked["io"]) or None
    given = {field: value for field, value in asked.items() if value is not None}
    if not given:
        raise click.UsageError("give at least one change, for instance --memory 64MiB")
    whole: dict[str, Any] = {k: int(v) if k.endswith("_bytes") else v for k, v in given.items()}
    status = call(config_path, lambda c: c.resize_task(name, api.Resize(**whole)))
    click.echo(f"{status.task_id}: generation {status.generation}, {status.state}")
