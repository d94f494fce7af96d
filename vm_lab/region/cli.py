"""`twine-lab region`: runs a region in one process, on virtual time, under faults."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec

from vm_lab.errors import reporting
from vm_lab.region import drawing, outcomes, results, scenario, story
from vm_lab.region.run import Job, run_many, seeds_of
from vm_lab.region.scenario import Scenario
from vm_lab.region.seed import OnProgress, SeedOutcome, run_seed
from vm_lab.region.shrink import shrink
from wire.errors import InvalidInput


@click.group()
def region() -> None:
    """Simulate a region with its control plane, hours in seconds, and report violations."""


@region.command("list")
def list_() -> None:
    """Show the scenarios."""
    for name in scenario.names():
        shown = scenario.load(name)
        faults = f" ({', '.join(shown.shows)})" if shown.shows else ""
        click.echo(f"{name:<22} {shown.says}{faults}")


@region.command("run")
@click.argument("name", metavar="SCENARIO")
@click.option("--seed", type=click.IntRange(min=0), help="One seed.")
@click.option("--seeds", help="Several: 1..300.")
@click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--story", "story_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Run this story instead of the one that the seed draws.")  # fmt: skip
@click.option("--shrink/--no-shrink", "small", default=True, show_default=True,
              help="Shorten the story of the first seed that breaks a rule.")  # fmt: skip
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path), help="A row for each seed.")
@click.option("--svg", type=click.Path(path_type=Path), help="A picture of the first seed.")
def run(
    name: str,
    seed: int | None,
    seeds: str | None,
    jobs: int,
    story_file: Path | None,
    small: bool,
    output: str,
    csv_file: Path | None,
    svg: Path | None,
) -> None:
    """Run seeds of a scenario; exit with 1 if one of them broke a rule.

    SCENARIO is one of `twine-lab region list`, or a .toml file. The picture shows the first seed
    that broke a rule, else the first seed.
    """
    with reporting("twine-lab"):
        for file in (csv_file, svg):
            _check_folder(file)
        chosen, numbers = scenario.load(name), _numbers(seed, seeds)
        if story_file is not None:
            ran = _run_story(chosen, numbers, story_file)
        elif len(numbers) == 1:
            ran = [run_seed(chosen, numbers[0], on_progress=_progress_of_seed(chosen))]
        else:
            ran = run_many([Job(chosen, number) for number in numbers], jobs, _progress())
        if sys.stderr.isatty():
            click.echo(err=True)  # ends the progress line
        broken = [outcome for outcome in ran if not outcome.ok]
        if broken and small and story_file is None:
            broken[0] = _shrunk(chosen, broken[0])
        _print(ran, broken, output)
        if csv_file is not None:
            csv_file.write_text(results.as_csv(ran))
        if svg is not None:
            svg.write_text(drawing.as_svg((broken or ran)[0]))
    if broken:
        sys.exit(1)


@region.command("faults")
@click.option("--write", type=click.Path(path_type=Path), help="Into this file: docs/faults.md.")
@click.option("--seeds", default="1..5", show_default=True, help="Seeds of each scenario.")
@click.option("--jobs", type=click.IntRange(1, 64), default=1, show_default=True)
def faults(write: Path | None, seeds: str, jobs: int) -> None:
    """Run every scenario that shows a fault, and write the table of the outcomes.

    Exits with 1 if a seed broke a rule.
    """
    with reporting("twine-lab"):
        _check_folder(write)
        page, broken = outcomes.faults_page(_range(seeds), jobs, _progress())
        if write is None:
            click.echo(page)
        else:
            write.write_text(page)
    for outcome in broken:
        click.echo(f"{outcome.scenario}: seed {outcome.seed} broke a rule", err=True)
    if broken:
        sys.exit(1)


def _check_folder(file: Path | None) -> None:
    """Raise `InvalidInput` if a file cannot be written after the run: its folder is missing."""
    if file is not None and not file.absolute().parent.is_dir():
        raise InvalidInput(f"cannot write {file}: there is no folder {file.parent}")


def _run_story(chosen: Scenario, numbers: range, file: Path) -> list[SeedOutcome]:
    if len(numbers) > 1:
        raise InvalidInput("a story runs with one seed", hint="give --seed")
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidInput(f"cannot read the story {file}: {e}") from e
    return [run_seed(chosen, numbers[0], story.read(text), _progress_of_seed(chosen))]


def _print(ran: list[SeedOutcome], broken: list[SeedOutcome], output: str) -> None:
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(results.as_rows(ran))).decode())
        return
    click.echo(results.as_text(ran))
    if broken:
        click.echo(results.as_story(broken[0]))


def _shrunk(chosen: Scenario, outcome: SeedOutcome) -> SeedOutcome:
    click.echo(f"shortening the story of seed {outcome.seed} …", err=True)
    return shrink(chosen, outcome.seed, outcome)


def _numbers(seed: int | None, seeds: str | None) -> range:
    """Return the seeds of the two options; 1 if neither is given."""
    if seeds is None:
        first = 1 if seed is None else seed
        return range(first, first + 1)
    if seed is not None:
        raise InvalidInput("--seed and --seeds exclude each other", hint="give one of them")
    return _range(seeds)


def _range(text: str) -> range:
    try:
        return seeds_of(text)
    except ValueError as e:
        raise InvalidInput(str(e)) from e


def _progress() -> Callable[[SeedOutcome], None] | None:
    """Return a function that counts finished seeds on a terminal; None: there is no terminal."""
    if not sys.stderr.isatty():
        return None
    count = 0

    def done(outcome: SeedOutcome) -> None:
        nonlocal count
        count += 1
        mark = "" if outcome.ok else f" seed {outcome.seed} broke a rule\n"
        click.echo(f"\r{count} seeds{mark}", nl=False, err=True)

    return done


def _progress_of_seed(chosen: Scenario) -> OnProgress:
    """Return a function that shows the progress of one seed.

    On a terminal it rewrites one line each second, else it prints a line every 30 seconds.
    """
    is_seen = sys.stderr.isatty()
    every_s, begin, end = (1.0, "\r", "") if is_seen else (30.0, "", "\n")
    shown_at = time.monotonic()

    def on_progress(virtual_s: float) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= every_s:
            shown_at = time.monotonic()
            text = f"{virtual_s / 60:.0f} minutes simulated, of {chosen.minutes:.0f} and a few more"
            click.echo(f"{begin}{text}{end}", nl=False, err=True)

    return on_progress
