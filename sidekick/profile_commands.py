"""Commands about profiles: none of them changes the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from sidekick.click_commands import COMPLETE, PROFILE_TYPE, declare
from sidekick.context import Context
from sidekick.explain import explain_setting
from sidekick.facts import FACTS, read_facts
from sidekick.grammar import OUTPUT, PROFILE
from sidekick.history import read_history
from sidekick.lint import Severity, lint_profiles
from sidekick.output import print_json, print_rows, print_table, printable
from sidekick.plan import make_plan
from sidekick.profile import Profile
from sidekick.settings import SETTINGS, settings_of
from sidekick.status import date_text
from sidekick.targets import target_of
from wire.errors import NotFound, TwineError


@click.command("list")
@declare(OUTPUT)
@click.pass_obj
def list_(ctx: Context, output: str) -> None:
    """Show the profiles of this host."""
    host, rows = ctx.host(), []
    for name in ctx.profiles.names():
        try:
            profile = ctx.profile(name, host)
            lineage = " <- ".join(profile.lineage[1:]) or "-"
            rows.append((name, profile.version, lineage, profile.description))
        except TwineError as e:
            rows.append((name, 0, "?", f"broken: {e}"))
    keys = ("name", "version", "extends", "description")
    print_rows(keys, ("PROFILE", "VERSION", "EXTENDS", "DESCRIPTION"), rows, output)


@click.command()
@declare(PROFILE)
@declare(OUTPUT)
@click.pass_obj
def show(ctx: Context, profile: str, output: str) -> None:
    """Show the settings of a profile for this host, with file and line of each."""
    host = ctx.host()
    found = ctx.profile(profile, host)
    wanted = target_of(found, host).wanted
    if output == "json":
        header: dict[str, Any] = {
            "name": found.name,
            "version": found.version,
            "owner": found.owner,
            "description": found.description,
            "lineage": found.lineage,
        }
        print_json(header | {"settings": wanted})
        return
    print_table(
        ("SETTING", "WANTED", "REQUIRED", "FROM"),
        [(w.setting, w.value, "yes" if w.required else "no", w.source) for w in wanted],
    )


@click.command()
@declare(OUTPUT)
@click.pass_obj
def facts(ctx: Context, output: str) -> None:
    """Show the facts of this host that profiles can use."""
    found = read_facts(ctx.host().fs)
    if output == "json":
        print_json(found)
        return
    rows = [
        (name, FACTS[name], msgspec.json.encode(value).decode()) for name, value in found.items()
    ]
    print_table(("FACT", "MEANING", "VALUE"), rows)


@click.command()
@click.argument("profiles", nargs=-1, type=PROFILE_TYPE)
@declare(OUTPUT)
@click.pass_obj
def lint(ctx: Context, profiles: tuple[str, ...], output: str) -> None:
    """Check profiles (all, if none is named); exit code 78 if one cannot be used anywhere."""
    host = ctx.host()
    names = profiles or tuple(ctx.profiles.names())
    for name in profiles:
        if ctx.profiles.find(name) is None:
            ctx.profile(name, host)  # raises an error that lists the profiles
    found = lint_profiles(ctx.profiles, names, read_facts(host.fs), host)
    errors = [f for f in found if f.severity is Severity.ERROR]
    ctx.code = 78 if errors else 0
    if output == "json":
        print_json(found)
        return
    print_table(
        ("PROFILE", "SEVERITY", "SETTING", "REASON"),
        [(f.profile, f.severity, f.field or "-", f.reason) for f in found],
    )
    notes = len(found) - len(errors)
    click.echo(f"{len(names)} profiles: {len(errors)} errors, {notes} notes")


@click.command()
@click.argument("setting")
@click.option("--profile", type=PROFILE_TYPE, help="Profile [default: the applied one].")
@declare(OUTPUT)
@click.pass_obj
def explain(ctx: Context, setting: str, profile: str | None, output: str) -> None:
    """Show the profile and line of a setting, its earlier value, and its documentation."""
    host, record = ctx.host(), ctx.state.load()
    name = profile or (record.applied.name if record.applied else "")
    if not name:
        raise NotFound("no profile is applied here", hint="name one with --profile")
    found = ctx.profile(name, host)
    wanted = target_of(found, host).wanted
    explained = explain_setting(host, found, wanted, record, setting)
    if output == "json":
        print_json(explained)
        return
    text = explained.text or ["-"]
    rows = [
        ("setting", explained.setting),
        (
            "wanted",
            f"{explained.wanted}{'' if explained.required else ' (if the host has it)'}",
        ),
        ("now", explained.lacking if explained.now is None else explained.now),
        ("original", explained.original or "not changed by any profile"),
        ("set by", f"{explained.source}, for profile {explained.profile}"),
        *(("" if n else "text", line) for n, line in enumerate(text)),
        ("costs", explained.needs),
        ("see", explained.documents or "-"),
    ]
    for label, value in rows:
        click.echo(printable(f"{label:10}{value}"))


@click.command()
@click.argument("one", type=PROFILE_TYPE)
@click.argument("other", type=PROFILE_TYPE)
@declare(OUTPUT)
@click.pass_obj
def diff(ctx: Context, one: str, other: str, output: str) -> None:
    """Show the settings in which two profiles differ on this host."""
    host = ctx.host()
    by_name = [
        {w.setting: w for w in target_of(ctx.profile(n, host), host).wanted} for n in (one, other)
    ]
    names = sorted(by_name[0].keys() | by_name[1].keys())
    rows = []
    for name in names:
        values = [w[name].value if name in w else "-" for w in by_name]
        if values[0].split() != values[1].split():
            sources = [w[name].source if name in w else "-" for w in by_name]
            rows.append((name, *values, " ".join(sources)))
    header = ("SETTING", one.upper(), other.upper(), "FROM")
    print_rows(("setting", one, other, "sources"), header, rows, output)
    if output != "json":
        click.echo(f"{len(rows)} of {len(names)} settings differ")


@click.command()
@declare(OUTPUT)
@click.pass_obj
def recommend(ctx: Context, output: str) -> None:
    """Show the profiles for hosts like this one, and the settings of each that it lacks."""
    host, rows = ctx.host(), []
    for name in ctx.profiles.names():
        try:
            profile = ctx.profile(name, host)
            wanted = target_of(profile, host).wanted
        except TwineError as e:
            rows.append((name, "no", 0, 0, str(e)))
            continue
        observed: dict[str, str | None] = {}
        settings = settings_of(w.setting for w in wanted)
        for setting in settings:
            observed |= setting.observe(host, [w.setting for w in wanted])
        plan = make_plan(settings, wanted, observed, {})
        fits = {True: "yes", False: "no", None: "any host"}[profile.fits]
        fits = "no" if plan.missing else fits
        lacks = ", ".join(w.setting for w in (*plan.missing, *plan.unsupported))
        rows.append((name, fits, len(wanted), len(plan.changes), lacks or "-"))
    rows.sort(key=lambda row: (["yes", "any host", "no"].index(row[1]), row[0]))
    keys = ("name", "fits", "settings", "changes", "lacks")
    print_rows(keys, ("PROFILE", "FITS", "SETTINGS", "CHANGES", "THIS HOST LACKS"), rows, output)


@click.command()
@click.option("-n", "--last", type=click.IntRange(1), default=20, help="Number of runs.")
@declare(OUTPUT)
@click.pass_obj
def history(ctx: Context, last: int, output: str) -> None:
    """Show the past runs on this host, the newest last."""
    entries = read_history(ctx.state)[-last:]
    if output == "json":
        print_json(entries)
        return
    print_table(
        ("WHEN", "COMMAND", "PROFILE", "STATE", "CHANGED", "MS", "DETAIL"),
        [
            (
                date_text(e.at, "%Y-%m-%dT%H:%M:%SZ"),
                e.command,
                e.name or "-",
                f"{e.state}, undone" if e.rolled_back else e.state,
                len(e.changed),
                f"{e.took_ms:.0f}",
                e.detail or "-",
            )
            for e in entries
        ],
    )


@click.command("import-tuned")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    help="Folder for the files; without it they are printed.",
)
@declare(OUTPUT)
@click.pass_obj
def import_tuned(ctx: Context, folder: Path, into: Path | None, output: str) -> None:
    """Convert TuneD's profiles; exit code 2 and a list if lines could not be converted."""
    from sidekick import tuned

    converted = tuned.convert(folder, _why_refused)
    if into:
        taken = [c.name for c in converted if (into / f"{c.name}.toml").exists()]
        if taken:
            raise click.UsageError(f"{into} already has these files: {', '.join(taken)}")
        for each in converted:
            ctx.state.disk.write(into / f"{each.name}.toml", each.text)
    left = [each for c in converted for each in c.left]
    ctx.code = 2 if left else 0
    if output == "json":
        print_json([{"name": c.name, "text": c.text, "left": c.left} for c in converted])
        return
    for each in () if into else converted:
        click.echo(f"# {each.name}.toml\n{each.text}")
    print_table(("WHERE", "NOT CONVERTED", "WHY"), [(e.where, e.line, e.reason) for e in left])
    click.echo(f"{len(converted)} profiles, {len(left)} lines not converted")


def _why_refused(kind: str, word: str) -> str:
    """Return why a profile may not set a key or a word of a table; empty: it may."""
    sections: dict[str, Any] = {
        "sysctl": {word: 1},
        "kernel": {"cmdline": [word]},
        "modules": {"load": [word.replace("-", "_")]},
        "services": {"running": [word]},
    }
    setting = SETTINGS[kind]
    try:
        decoded = msgspec.convert(sections[kind], setting.section)
    except msgspec.ValidationError:
        return "is not a valid name of a profile"
    errors = setting.check(Profile(name="imported", sections={kind: decoded}))
    return errors[0].reason.removesuffix("(in imported)").strip() if errors else ""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the shell's completion script for commands, options and profiles."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(ctx.find_root().command, {}, "sidekick", COMPLETE)
    click.echo(made.source_template % made.source_vars())


@click.command()
@click.pass_context
def man(ctx: click.Context) -> None:
    """Print the manual page in the format of man(1)."""
    from sidekick.manual import page

    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    click.echo(page(root.command), nl=False)


COMMANDS = (
    list_,
    show,
    facts,
    lint,
    explain,
    diff,
    recommend,
    history,
    import_tuned,
    completion,
    man,
)
