"""Sidekick's commands for click, which prints help, completes, and reports errors of a line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

from sidekick.grammar import Argument, CliProgram, Command, Kind, Option, ProfileName, Word
from sidekick.profile import Library
from sidekick.settings import SETTINGS

COMPLETE = "_SIDEKICK_COMPLETE"
"""Environment variable by which a shell requests completions."""

_F = TypeVar("_F", bound=Callable[..., Any])
MakeContext = Callable[..., Any]
"""Makes the first argument of the commands from the program's options."""


class _Type(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A kind of value as a click type."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.name = kind.metavar

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value; a default is returned unchanged, because it is not text."""
        if not isinstance(value, str):
            return value
        try:
            return self.kind.read(value)
        except ValueError as e:
            self.fail(f"{e}.", param, ctx)


class _ProfileType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """The name of a profile; completed from those of the host."""

    name = "profile"

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[click.shell_completion.CompletionItem]:
        """Return the profiles whose names begin with the text."""
        options = ctx.find_root().params
        library = Library(
            options.get("profiles") or ctx.meta.get("sidekick.profiles", ()), SETTINGS
        )
        return [
            click.shell_completion.CompletionItem(name)
            for name in library.names()
            if name.startswith(incomplete)
        ]


PROFILE_TYPE = _ProfileType()


def declare(declared: Argument | Option) -> Callable[[_F], _F]:
    """Return the decorator that adds a declared argument or option to a click command."""
    names, options = _click_parameters(declared)
    add = click.argument if isinstance(declared, Argument) else click.option
    return add(*names, **options)


def _parameter(declared: Argument | Option) -> click.Parameter:
    names, options = _click_parameters(declared)
    kind = click.Argument if isinstance(declared, Argument) else click.Option
    return kind(names, **options)


def _click_parameters(declared: Argument | Option) -> tuple[list[str], dict[str, Any]]:
    """Return the names of an option or an argument, and its other parameters for click."""
    if isinstance(declared, Argument):
        return [declared.name], {"type": _type(declared.kind)}
    names = [*declared.words, declared.name]
    if declared.kind is None:
        return names, {"is_flag": True, "help": declared.help}
    return names, {
        "type": _type(declared.kind),
        "metavar": declared.kind.metavar or None,
        "default": None if declared.is_repeatable else declared.default,
        "multiple": declared.is_repeatable,
        "help": declared.help,
    }


def group(
    program: CliProgram, others: Iterable[click.Command], make_context: MakeContext
) -> click.Group:
    """Return the program with additional click commands; `make_context` makes their argument."""

    @click.pass_context
    def callback(ctx: click.Context, /, **options: Any) -> None:
        ctx.obj = make_context(**options)

    commands = [*(_command(each) for each in program.commands.values()), *others]
    return click.Group(
        name="sidekick",
        commands={each.name: each for each in commands if each.name},
        callback=callback,
        params=[_parameter(option) for option in program.options],
        help=program.help,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def run(cli: click.Group, line: Sequence[str]) -> int:
    """Run the command of a line, or print its error; return the exit code."""
    try:
        with cli.make_context("sidekick", list(line)) as ctx:
            cli.invoke(ctx)
            return int(ctx.obj.code)
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.UsageError as e:
        e.show()
        return 64
    except click.Abort:
        return 1


def complete(cli: click.Group) -> None:
    """Print completions and exit if a shell requests them; otherwise return."""
    if COMPLETE in os.environ:
        cli.main(prog_name="sidekick")


def _command(declared: Command) -> click.Command:
    return click.Command(
        declared.name,
        callback=click.pass_obj(declared.function),
        params=[*map(_parameter, declared.arguments), *map(_parameter, declared.options)],
        help=declared.function.__doc__,
    )


def _type(kind: Kind) -> click.ParamType:  # type: ignore[type-arg]  # generic since click 8.4
    if isinstance(kind, ProfileName):
        return PROFILE_TYPE
    return click.Choice(kind.words) if isinstance(kind, Word) else _Type(kind)
