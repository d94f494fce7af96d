"""Makes a program's manual page and its shell completion from its click commands."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click
from click.shell_completion import get_completion_class


def manual(cli: click.Group, name: str, see_also: str) -> str:
    """Return the manual page of a program as roff (man(7)), one section for each command."""
    root = click.Context(cli, info_name=name)
    lines = [
        f'.TH {_word(name.upper())} 1 "" "Twine"',
        ".SH NAME",
        f"{_text(name)} \\- {_text(_first_line(cli))}",
        ".SH SYNOPSIS",
        f".B {_text(name)}",
        "[options] command [options] [arguments]",
        ".SH OPTIONS",
        *_options(cli, root),
        ".SH COMMANDS",
    ]
    for words, command, context in _commands(cli, root):
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f".SS {_text(' '.join(words))} {_text(usage)}".rstrip()]
        lines += [_text(paragraph) + "\n.PP" for paragraph in _paragraphs(command)]
        lines += list(_options(command, context))
    lines += [".SH SEE ALSO", _text(see_also)]
    return "\n".join(lines) + "\n"


def completion(cli: click.Command, name: str, shell: str) -> str:
    """Return the completion script of a program for a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    variable = f"_{name.replace('-', '_')}_COMPLETE".upper()
    return kind(cli, {}, name, variable).source()


def _commands(
    group: click.Group, context: click.Context, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command, click.Context]]:
    """Yield every command below a group with its words, sorted."""
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        inner = click.Context(command, info_name=name, parent=context)
        yield (*words, name), command, inner
        if isinstance(command, click.Group):
            yield from _commands(command, inner, (*words, name))


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and isinstance(parameter, click.Option):
            yield f".TP\n.B {_text(record[0])}\n{_text(record[1])}"


def _paragraphs(command: click.Command) -> list[str]:
    parts = inspect.cleandoc(command.help or "").split("\n\n")
    return [" ".join(part.split()) for part in parts if part.strip()]


def _first_line(command: click.Command) -> str:
    return next(iter(_paragraphs(command)), "").split(". ")[0].rstrip(".")


def _word(text: str) -> str:
    return text.replace("-", "\\-")


def _text(text: str) -> str:
    """Return a line of text escaped for roff."""
    safe = text.replace("\\", "\\e").replace("-", "\\-")
    safe = "".join(c if c.isascii() else f"\\[u{ord(c):04X}]" for c in safe)
    return "\\&" + safe if safe.startswith((".", "'")) else safe
