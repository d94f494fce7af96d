"""Sidekick's command line: its commands, declared once, and a parser of well-formed lines.

Well-formed lines are parsed here, without click: for `apply-profile` and the timer's `verify`
importing click would take longer than all that they do. Click handles help, completion, mistakes
and commands that only people use, from the same declarations (`click_commands.py`). Both parsers
give a line the same meaning (`tests/property/sidekick/test_grammar.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec


class Kind(Protocol):
    """The form of a value in a command line."""

    @property
    def metavar(self) -> str:
        """The placeholder for such a value in the help; empty: the name of its option."""

    def read(self, text: str) -> Any:
        """Return the value. Raises `ValueError` with a sentence that explains the error."""


class ProfileName(msgspec.Struct, frozen=True):
    """The name of a profile; a shell completes it."""

    metavar: str = ""

    def read(self, text: str) -> str:
        """Return the name, which the library looks up."""
        return text


class PathText(msgspec.Struct, frozen=True):
    """A path; the file need not exist."""

    metavar: str = "PATH"

    def read(self, text: str) -> Path:
        """Return the path."""
        return Path(text)


class Word(msgspec.Struct, frozen=True):
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def metavar(self) -> str:
        """All words."""
        return f"[{'|'.join(self.words)}]"

    def read(self, text: str) -> str:
        """Return the word."""
        if text not in self.words:
            raise ValueError(f"{text!r} is not one of {', '.join(self.words)}")
        return text


class Number(msgspec.Struct, frozen=True):
    """A number within bounds; an integer if `least` is one."""

    least: int | float
    most: int | float | None = None

    @property
    def metavar(self) -> str:
        """The type of the number."""
        return "INTEGER" if isinstance(self.least, int) else "NUMBER"

    def read(self, text: str) -> int | float:
        """Return the number."""
        number_type = type(self.least)
        try:
            number = number_type(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a valid {self.metavar.lower()}") from None
        if not self.least <= number <= (number if self.most is None else self.most):
            bounds = f"at least {self.least}" + (f", at most {self.most}" if self.most else "")
            raise ValueError(f"{text} is not in range: {bounds}")
        return number


class Span(msgspec.Struct, frozen=True):
    """A span of time; its value is in seconds."""

    metavar: str = "SPAN"

    def read(self, text: str) -> float:
        """Return the seconds."""
        unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
        digits = text[:-1] if unit else text
        seconds = float(digits) * (unit or 1) if digits.replace(".", "", 1).isdecimal() else 0.0
        if not 1 <= seconds <= 86400:
            raise ValueError(f"{text!r} is not a span from 1s to 24h, such as 90s or 10m")
        return seconds


class Argument(msgspec.Struct, frozen=True):
    """A positional value. All are required."""

    name: str
    kind: Kind


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A named value, or a flag if it has no kind."""

    words: tuple[str, ...]
    """How it is written: `-o`, `--output`."""
    help: str
    kind: Kind | None = None
    default: Any = None
    is_repeatable: bool = False
    """Whether it may be repeated; the value is then a tuple of all."""
    parameter: str = ""
    """The parameter of the function, if its name differs from the option's."""

    @property
    def name(self) -> str:
        """The parameter of the function that receives the value."""
        return self.parameter or self.words[-1].removeprefix("--").replace("-", "_")


class Command(msgspec.Struct, frozen=True):
    """One command."""

    name: str
    function: Callable[..., None]
    """Its docstring is the help."""
    arguments: tuple[Argument, ...]
    options: tuple[Option, ...]


class FunctionCall(msgspec.Struct, frozen=True):
    """A parsed command line."""

    command: Command
    program: Mapping[str, Any]
    """The values of the options before the command."""
    values: Mapping[str, Any]
    """The values of the command."""


class CliProgram(msgspec.Struct, frozen=True):
    """All commands, and the options before them."""

    help: str
    options: tuple[Option, ...]
    commands: dict[str, Command] = msgspec.field(default_factory=dict)

    def command(
        self, name: str, *parameters: Argument | Option
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Return a decorator that makes a function the command of this name."""

        def declare(function: Callable[..., None]) -> Callable[..., None]:
            arguments = tuple(p for p in parameters if isinstance(p, Argument))
            options = tuple(p for p in parameters if isinstance(p, Option))
            self.commands[name] = Command(name, function, arguments, options)
            return function

        return declare

    def read(self, line: Sequence[str]) -> FunctionCall | None:
        """Return the parsed line, None if only click can parse or report it."""
        try:
            program, rest = _parse(self.options, line, leading=True)
            command = self.commands[rest[0]]
            values, words = _parse(command.options, rest[1:])
            for argument, word in zip(command.arguments, words, strict=True):
                values[argument.name] = argument.kind.read(word)
        except (LookupError, ValueError):
            return None
        return FunctionCall(command, program, values)


def _parse(
    options: Sequence[Option], line: Sequence[str], *, leading: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the options, and the other words; `leading` ends at the first of these.

    Raises `LookupError` or `ValueError` if the line is not well-formed.
    """
    known = {word: option for option in options for word in option.words}
    values = {o.name: () if o.is_repeatable else o.default for o in options}
    values |= {o.name: False for o in options if o.kind is None}
    words = list(line)
    positional: list[str] = []
    while words and not (leading and positional):
        word = words.pop(0)
        if not word.startswith("-"):
            positional.append(word)
            continue
        name, equals, text = word.partition("=")
        option = known[name]
        if option.kind is None:
            if equals:
                raise ValueError(f"{name} takes no value")
            values[option.name] = True
            continue
        if equals and not name.startswith("--"):
            raise ValueError(f"{name} and its value are two words")
        value = option.kind.read(text if equals else words.pop(0))
        values[option.name] = (*values[option.name], value) if option.is_repeatable else value
    return values, positional + words


PROFILE = Argument("profile", ProfileName())
OUTPUT = Option(
    words=("-o", "--output"),
    kind=Word(("table", "json")),
    default="table",
    help="Form of the result.",
)
