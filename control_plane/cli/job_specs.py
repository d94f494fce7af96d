"""`twinectl job show` and `twinectl job history`: the specification of a job, now and before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import click
import msgspec

from control_plane.api.jobs import JobSpec, JobStatus
from control_plane.cli import show
from control_plane.cli.jobs import job
from control_plane.cli.program import Target, shows_answer
from control_plane.job_control.core.intents import next_version
from wire.errors import NotFound

_NOTHING = "(not set)"
_LONGEST = 120
"""Characters of a value in a difference."""


@job.command("show")
@click.argument("name")
@click.option(
    "--version", type=click.IntRange(1), help="A version of `job history` [default: newest]."
)
@shows_answer
def job_show(target: Target, name: str, version: int | None, output: str) -> None:
    """Print the specification of job NAME, as a file that can be applied again."""
    status = target.ask(lambda client: client.get_job(name))
    record = status.record
    found = record.spec if version in (None, record.version) else record.specs.get(version or 0)
    if found is None:
        kept = ", ".join(str(v) for v in sorted(record.specs))
        was = "no longer has" if (version or 0) < next_version(record) else "has never had a"
        raise NotFound(
            f"job {name} {was} version {version}",
            hint=f"kept versions are those that tasks run or that a rollback may restore: {kept}",
        )
    show.emit(output, found, lambda: click.echo(as_file(found), nl=False))


@job.command("history")
@click.argument("name")
@shows_answer
def job_history(target: Target, name: str, output: str) -> None:
    """Show the kept versions of job NAME, and what each changed."""
    status = target.ask(lambda client: client.get_job(name))
    show.emit(output, status.record.specs, lambda: _print_history(status))


def _print_history(status: JobStatus) -> None:
    record = status.record
    before: JobSpec | None = None
    runs = Counter(task.version for task in record.tasks)
    specs = record.specs | {record.version: record.spec}
    for version in sorted(specs):
        spec = specs[version]
        mark = " (newest)" if version == record.version else ""
        click.echo(f"version {version}{mark}: {runs[version]} task(s), image {spec.image[7:19]}")
        for line in [] if before is None else differences(before, spec):
            show.lines(f"  {line}")
        before = spec
    rollout = record.rollout
    if rollout is not None and rollout.reason:
        show.lines(f"last update: {rollout.reason}")


def as_file(spec: JobSpec) -> str:
    """Return a job file in YAML; fields that it omits have their defaults."""
    import yaml

    written: str = yaml.safe_dump(explicit_fields(spec), sort_keys=False, allow_unicode=True)
    return written


def explicit_fields(spec: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a specification that are not their defaults, as plain values."""
    found = {}
    for field in msgspec.structs.fields(spec):
        value = getattr(spec, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if default is not msgspec.NODEFAULT and value == default:
            continue
        if isinstance(value, msgspec.Struct):
            found[field.encode_name] = explicit_fields(value)
        else:
            found[field.encode_name] = msgspec.to_builtins(value)
    return found


class ChangedField(msgspec.Struct, frozen=True, kw_only=True):
    """A field in which two specifications differ."""

    field: str
    before: Any
    """None: the field is not set."""
    after: Any


def changed_fields(before: JobSpec, after: JobSpec) -> list[ChangedField]:
    """Return each field in which two specifications differ, by name."""
    old, new = dict(_flat(explicit_fields(before))), dict(_flat(explicit_fields(after)))
    return [
        ChangedField(field=name, before=old.get(name), after=new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def differences(before: JobSpec, after: JobSpec) -> list[str]:
    """Return a line for each field in which two specifications differ."""
    return [
        f"{one.field}: {_shown(one.before)} -> {_shown(one.after)}"
        for one in changed_fields(before, after)
    ]


def _flat(document: dict[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{where}{name}.")
        else:
            yield where + name, value


def _shown(value: Any) -> str:
    if value is None:
        return _NOTHING
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
