"""`twinectl job intents | push | scale | canary | hold | runtime | adopt`: by dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from control_plane.api.intent_changes import (
    CanaryChange,
    HoldChange,
    InfrastructureChange,
    IntentChange,
    JobIntents,
    PushChange,
    SizeChange,
)
from control_plane.api.intents import Dimension, StoredIntent
from control_plane.cli import show
from control_plane.cli.images import names_of
from control_plane.cli.jobfile import digest_of, read_job
from control_plane.cli.jobs import job
from control_plane.cli.program import Target, options, refuse_others, shows_answer
from control_plane.cli.show import output_option
from wire.options import part, seconds

_REASON = click.option(
    "--reason", default="", help="Reason, kept with the intent and in the audit log."
)
_EXPECT = click.option(
    "--expect", type=click.IntRange(0), help="Only if the intent still has this version."
)
_TAKE_OVER = click.option(
    "--take-over",
    is_flag=True,
    help="Proceed even if another user is its writer; you become its writer.",
)
_FITS_END = {"name", "end", "output", *IntentChange.__struct_fields__}
_COLUMNS = ("dimension", "writer", "version", "since", "until", "effect", "waits for", "reason")


_options = options(
    *(click.pass_obj, click.argument("name"), _REASON, _EXPECT, _TAKE_OVER, output_option)
)
"""The options of all writes of an intent."""


def _config_option(text: str) -> Callable[[Any], Any]:
    """Return an option that reads files: NAME=FILE → the configuration of a change."""

    def read(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, str]:
        found = {}
        for pair in given:
            name, equals, path = pair.partition("=")
            if name in found:
                raise click.UsageError(f"--config {name} is given twice")
            try:  # as bytes: the task gets the line ends that the file has
                found[name] = Path(path).read_bytes().decode() if equals else ""
            except (OSError, ValueError) as e:
                raise click.UsageError(f"--config {pair}: {e}") from e
            if not equals:
                raise click.UsageError(f"--config takes NAME=FILE, not {pair!r}")
        return found

    return click.option(
        "--config", "configuration", metavar="NAME=FILE", multiple=True, callback=read, help=text
    )


@job.command()
@click.argument("name")
@shows_answer
def intents(target: Target, name: str, output: str) -> None:
    """Show the intents of each writer for job NAME, their effect now, and what they wait for."""
    _show(target.ask(lambda client: client.get_intents(name)), output)


@job.command()
@_options
@click.option(
    "--file", type=click.Path(path_type=Path), help="The job file to push, except its size."
)
@click.option("--image", help="The image to push, by name or digest; everything else stays.")
@_config_option("Push these files instead of the present configuration; repeat.")
@click.option(
    "--share",
    type=part(),
    default=1.0,
    show_default=True,
    help="The share of the tasks that runs it; the others keep their version.",
)
@click.option(
    "--tasks", type=click.IntRange(0, 15_000), help="Number of tasks, instead of --share."
)
@click.option("--give-back", "gives_back", is_flag=True, help="Give up the ownership of the push.")
def push(
    target: Target,
    name: str,
    file: Path | None,
    image: str | None,
    configuration: dict[str, str],
    output: str,
    **given: Any,
) -> None:
    """Push a specification to a part of job NAME; without --file and --image the next stage."""
    spec = None if file is None else read_job(file, (), lambda: names_of(target))
    change = PushChange(
        spec=spec,
        image=_digest(target, image),
        configuration=configuration or None,
        **given,
    )
    _put(target, name, Dimension.PUSH, change, output)


@job.command()
@_options
@click.option("--tasks", type=click.IntRange(0, 15_000), required=True, help="Number of tasks.")
@click.option("--minimum", type=click.IntRange(0, 15_000), help="Lower bound.")
@click.option("--maximum", type=click.IntRange(0, 15_000), help="Upper bound.")
def scale(target: Target, name: str, output: str, **given: Any) -> None:
    """Set the number of tasks of job NAME. A running push keeps its share at every size."""
    _put(target, name, Dimension.SIZE, SizeChange(**given), output)


@job.command()
@_options
@click.option("--tasks", type=click.IntRange(1, 15_000), default=1, show_default=True)
@click.option("--share", type=part(of_some=True), help="Instead of --tasks.")
@click.option(
    "--traffic",
    type=part(),
    help=(
        "The share of the requests that its tasks get together; by default the same as other tasks."
    ),
)
@click.option("--image", help="Another image, by name or digest.")
@click.option(
    "--env",
    "environment",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override the job's environment.",
)
@_config_option("Override the job's configuration; repeat.")
@click.option("--machine-type", help="Only on machines of this type, while it has any.")
@click.option("--for", "lasts_s", type=seconds(), help="Time after which it ends.")
@click.option("--end", is_flag=True, help="End the canary now.")
def canary(
    target: Target,
    name: str,
    lasts_s: float | None,
    image: str | None,
    environment: tuple[str, ...],
    end: bool,
    output: str,
    **given: Any,
) -> None:
    """Run a variant on some tasks of job NAME for a while, separate from any push."""
    if end:
        refuse_others("--end", _FITS_END, "nothing begins")
        _withdraw(target, name, Dimension.CANARY, output, **given)
        return
    if lasts_s is None:
        raise click.UsageError("--for DURATION is missing: a canary has a limited time")
    source = click.get_current_context().get_parameter_source("tasks")
    if given["share"] is not None and source is ParameterSource.COMMANDLINE:
        raise click.UsageError("--tasks: a share is given as well: give one of them")
    pairs = _environment(environment)
    change = CanaryChange(lasts_s=lasts_s, image=_digest(target, image), environment=pairs, **given)
    _put(target, name, Dimension.CANARY, change, output)


def _environment(given: Sequence[str]) -> dict[str, str]:
    """Return the variables of `--env`; raise if one is not KEY=VALUE, or is given twice."""
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--env takes KEY=VALUE, not {text!r}")
        if key in found:
            raise click.UsageError(f"--env {key} is given twice")
        found[key] = value
    return found


@job.command()
@_options
@click.option("--for", "lasts_s", type=seconds(), help="Time after which it ends.")
@click.option("--end", is_flag=True, help="End the hold now.")
def hold(
    target: Target, name: str, lasts_s: float | None, end: bool, output: str, **meta: Any
) -> None:
    """Begin no change of job NAME that an intent asks for, for a while.

    Failures are repaired and machines are emptied for maintenance as before.
    """
    if end:
        refuse_others("--end", _FITS_END, "nothing begins")
        _withdraw(target, name, Dimension.HOLD, output, **meta)
        return
    if lasts_s is None:
        raise click.UsageError("--for DURATION is missing: a hold has a limited time")
    _put(target, name, Dimension.HOLD, HoldChange(lasts_s=lasts_s, **meta), output)


@job.command()
@click.argument("name")
@_TAKE_OVER
@_REASON
@shows_answer
def adopt(target: Target, name: str, take_over: bool, reason: str, output: str) -> None:
    """Become the writer of job NAME's specification and size, as both are now.

    Nothing changes and no task restarts. From then on a job file of another writer changes neither.
    """
    known = target.ask(lambda client: client.get_intents(name))
    known_intents = {view.dimension: view.intent for view in known.intents}
    push, size = known_intents.get(Dimension.PUSH), known_intents.get(Dimension.SIZE)
    meta: dict[str, Any] = {"reason": reason or "adopted", "take_over": take_over}
    pushed = (push.value or {}) if push is not None else {}
    tasks = (size.value or {}).get("tasks", known.size) if size is not None else known.size
    owned = PushChange(
        share=pushed.get("share", 1.0), tasks=pushed.get("tasks"), expect=_version(push), **meta
    )
    target.ask(lambda client: client.put_intent(name, Dimension.PUSH, owned))
    change = SizeChange(tasks=tasks, expect=_version(size), **meta)
    _put(target, name, Dimension.SIZE, change, output)


def _version(intent: StoredIntent | None) -> int:
    return 0 if intent is None else intent.version


@job.command()
@_options
@click.option("--to", "runtime", required=True, help="Name of the runtime.")
def runtime(target: Target, name: str, runtime: str, output: str, **meta: Any) -> None:
    """Start the next push of job NAME with a runtime; operators only."""
    change = InfrastructureChange(runtime=runtime, **meta)
    _put(target, name, Dimension.INFRASTRUCTURE, change, output)


def _digest(target: Target, image: str | None) -> str | None:
    return None if image is None else digest_of(image, lambda: names_of(target))


def _put(
    target: Target, name: str, dimension: Dimension, change: IntentChange, output: str
) -> None:
    _show(target.ask(lambda client: client.put_intent(name, dimension, change)), output)


def _withdraw(target: Target, name: str, dimension: Dimension, output: str, **given: Any) -> None:
    change = IntentChange(**{key: given[key] for key in IntentChange.__struct_fields__})
    _show(target.ask(lambda client: client.withdraw_intent(name, dimension, change)), output)


def _show(found: JobIntents, output: str) -> None:
    def text() -> None:
        rows = [
            (
                view.dimension,
                view.intent.writer or "-",
                view.intent.version,
                show.local_time(view.intent.since),
                "-" if view.intent.expires_at is None else show.local_time(view.intent.expires_at),
                view.effect,
                view.waits_for or "-",
                view.intent.reason or "-",
            )
            for view in found.intents
        ]
        show.table(_COLUMNS, rows)
        runs = [(c.version, c.wanted, c.running, c.why) for c in found.versions]
        show.table(("job version", "tasks wanted", "running", "why"), runs)

    show.emit(output, found, text)
