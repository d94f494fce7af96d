"""`twinectl pipeline`: commands for continuous delivery, through its service's own API."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from control_plane.api.intent_changes import REASON_MAX
from control_plane.cli import show
from control_plane.cli.images import names_of
from control_plane.cli.jobfile import digest_of, read_document
from control_plane.cli.program import Target, ask, options, shows_answer
from control_plane.cli.show import output_option
from wire import tls
from wire.errors import InvalidInput
from wire.options import nonempty_name

if TYPE_CHECKING:
    from control_plane.api.operations import JobEvent
    from control_plane.client import ControlPlaneClient
    from conveyor.client import ConveyorClient
    from conveyor.runs import PipelineRun, PipelineView, RunHistory

T = TypeVar("T")
DEFAULT_SERVICE = "unix:/run/twine-conveyor/conveyor.sock"
_PAGE = 1000

_FILE = click.argument("file", type=click.Path(path_type=Path))
_NAME = click.argument("name")
_REASON = click.option("--reason", default="", help="Kept in the history.")
_EXPECT = click.option(
    "--expect",
    type=click.IntRange(0),
    metavar="VERSION",
    help="Refuse if the pipeline has changed since: `version` of `status -o json`.",
)


@click.group()
@click.option(
    "--service",
    envvar="TWINE_CONVEYOR",
    default=DEFAULT_SERVICE,
    show_default=True,
    metavar="URL",
    help="The delivery service: unix:/PATH, or https://HOST:PORT with --credential.",
)
@click.pass_context
def pipeline(context: click.Context, service: str) -> None:
    """Deliver new images to jobs in stages with gates; roll back if one fails."""
    context.meta["service"] = service


@pipeline.command("plan")
@_FILE
@shows_answer
def plan_(target: Target, file: Path, output: str) -> None:
    """Show what FILE would change, and what its next run would do. Exit code 2: changes."""
    from conveyor.pipeline_file import pipeline_spec

    spec = pipeline_spec(read_document(file), str(file))
    found = _ask(target, lambda c: c.plan_pipeline(spec))

    def lines() -> None:
        click.echo(f"changes: {', '.join(found.changed) or 'none'}")
        for number, step in enumerate(found.steps, 1):
            show.lines(f"{number}. {step}")
        for warning in found.warnings:
            show.lines(f"warning: {warning}")

    show.emit(output, found, lines)
    if found.changed:
        raise click.exceptions.Exit(2)


@pipeline.command()
@_FILE
@shows_answer
def apply(target: Target, file: Path, output: str) -> None:
    """Create the pipeline of FILE, or change it; an active run keeps its file."""
    from conveyor.pipeline_file import pipeline_spec

    spec = pipeline_spec(read_document(file), str(file))
    _show(_ask(target, lambda c: c.apply_pipeline(spec)), output)


@pipeline.command("list")
@shows_answer
def list_(target: Target, output: str) -> None:
    """Show all pipelines."""
    from conveyor.runs import short_image

    found = _ask(target, lambda c: c.list_pipelines())
    rows = []
    for view in found.pipelines:
        run, name = view.record.active or view.record.waiting or view.last, view.record.spec.name
        if run is None:
            rows.append((name, "-", "-", "idle", ""))
        else:
            detail = run.waits or run.reason
            rows.append((name, str(run.number), short_image(run.image), run.state.value, detail))
    rows += [(name, "-", "-", "damaged", why) for name, why in found.damaged.items()]
    columns = ("pipeline", "run", "image", "state", "detail")
    show.emit(output, found, lambda: show.table(columns, rows))


@pipeline.command()
@_NAME
@output_option
@click.option("--watch", is_flag=True, help="Show it again every two seconds, until Ctrl-C.")
@click.pass_obj
def status(target: Target, name: str, output: str, watch: bool) -> None:
    """Show the run of a pipeline, what it waits for, and the measurements of its gates."""
    while True:
        _show(_ask(target, lambda c: c.get_pipeline(name)), output)
        if not watch:
            return
        time.sleep(2)
        click.echo()


@pipeline.command()
@_NAME
@click.option("--run", type=click.IntRange(1), help="Only this run.")
@click.option("--limit", type=click.IntRange(1, 100), default=10, show_default=True)
@show.output_choice(
    "svg", text="text for people, json for programs, svg for a Gantt chart of the newest run."
)
@click.pass_obj
def history(target: Target, name: str, run: int | None, limit: int, output: str) -> None:
    """Show the author of each run, and the verdicts of its gates with their measurements.

    Without --run these are the newest 500 verdicts of each run.
    """
    found = _ask(target, lambda c: c.history(name, limit, run))
    if output == "svg":
        if not found.runs:
            raise InvalidInput(f"pipeline {name} has no run to draw")
        click.echo(_svg(target, found), nl=False)
        return
    show.emit(output, found, lambda: _print_history(found, name))


@pipeline.command()
@_NAME
@click.option("--image", help="The image to deliver, by name or digest.")
@click.option("--release", help="For a pipeline of fleets: the release, as 0.2.0.")
@_REASON
@shows_answer
def start(
    target: Target, name: str, image: str | None, release: str | None, reason: str, output: str
) -> None:
    """Start a run by hand."""
    from conveyor.api import StartRequest

    if (image is None) == (release is None):
        raise InvalidInput(
            "name either --image or --release", hint=f"twinectl pipeline status {name}"
        )
    if image is not None:
        release = digest_of(image, lambda: names_of(target))
    try:
        request = msgspec.convert({"image": release, "reason": reason}, StartRequest)
    except msgspec.ValidationError as e:
        if len(reason) > REASON_MAX:
            raise InvalidInput(f"--reason has more than {REASON_MAX} characters") from e
        expected = "sha256: and 64 hex digits" if image is not None else "a release (0.2.0)"
        option = "--image" if image is not None else "--release"
        given = (image or release or "")[:80]
        raise InvalidInput(f"{option} {given!r} is not valid: expected {expected}") from e
    _show(_ask(target, lambda c: c.start_run(name, request)), output)


@pipeline.command()
@_NAME
@click.option("--yes", is_flag=True, help="Required: its history is removed, too.")
@click.pass_obj
def remove(target: Target, name: str, yes: bool) -> None:
    """Remove a pipeline without a run; its jobs stay as they are."""
    if not yes:
        raise InvalidInput(f"removing pipeline {name} needs --yes: its history is removed, too")
    _ask(target, lambda c: c.remove_pipeline(name))


def _verb(verb: str, text: str) -> None:
    gate = click.option(
        "--gate", type=nonempty_name(), help="Approval to give [default: all that wait]."
    )

    @pipeline.command(verb, help=text)
    @_NAME
    @_EXPECT
    @_REASON
    @output_option
    @options(*([gate] if verb == "approve" else []))
    @click.pass_obj
    def act(
        target: Target,
        name: str,
        reason: str,
        output: str,
        expect: int | None,
        gate: str | None = None,
    ) -> None:
        from conveyor.api import ControlRequest, ControlVerb

        request = ControlRequest(
            verb=ControlVerb(verb), reason=reason, gate=gate or "", expect=expect
        )
        _show(_ask(target, lambda c: c.control_run(name, request)), output)


for _word, _text in (
    ("approve", "Give an approval for which the run waits."),
    ("pause", "Pause the run at its step: no further task is updated, no gate decides."),
    ("resume", "Resume a paused run; its step is observed again from its start."),
    ("skip", "End the current step without its soak and gates; needs --reason."),
    ("rollback", "Roll back to the image that finished last, or to the one before it."),
    ("abort", "Abort the run and pause its jobs as they are; needs --reason."),
):
    _verb(_word, _text)


def _ask(target: Target, work: Callable[[ConveyorClient], Awaitable[T]]) -> T:
    """Call the delivery service and return its answer."""
    from conveyor.client import ConveyorClient

    endpoint = click.get_current_context().meta["service"]
    context = None
    if target.credential is not None and not endpoint.startswith("unix:"):
        from conveyor.routes import IDENTITY

        context = tls.client_context(tls.load(target.credential), IDENTITY)

    return ask(lambda: ConveyorClient(endpoint, context), work)


def _show(view: PipelineView, output: str) -> None:
    from conveyor.core.status_page import status_lines

    show.emit(output, view, lambda: show.lines(*status_lines(view)))


def _print_history(found: RunHistory, name: str) -> None:
    from conveyor.core.status_page import run_line

    if not found.runs:
        show.lines(f"pipeline {name} has no run yet")
    for run in found.runs:
        show.lines(f"{run_line(run)} (by {run.by}, {run.trigger})")
        for entry in run.log:
            show.lines(f"  {_stamp(entry.at)}  {entry.who}: {entry.what}")
        rows = [
            (_stamp(v.at), v.step + 1, v.gate, v.outcome.value, v.reason)
            for v in found.verdicts.get(run.number, [])
        ]
        if rows:
            show.table(("at", "step", "gate", "outcome", "saw"), rows)


def _svg(target: Target, found: RunHistory) -> str:
    from control_plane.cli.pipeline_gantt import gantt_svg

    run = found.runs[0]
    return gantt_svg(run, found.verdicts.get(run.number, []), _events(target, run), time.time())


def _events(target: Target, run: PipelineRun) -> list[JobEvent]:
    """Return what was done to the tasks of the run's first job during the run."""
    if not run.spec.jobs:
        return []

    async def work(client: ControlPlaneClient) -> list[JobEvent]:
        found: list[JobEvent] = []
        after, more = 0, True
        while more:
            page = await client.job_events(run.spec.jobs[0], after, _PAGE)
            found += [e for e in page.events if run.created <= e.end <= (run.ended or e.end)]
            more = page.more and bool(page.events)
            after = page.events[-1].seq if page.events else after
        return found

    return target.ask(work)


def _stamp(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
