"""Profiles that are templates: `NAME.toml.j2` is rendered by jinja2 to TOML, with the host's facts.

Plain TOML with `[[when]]` and expressions is checked for all hosts. A template is checked only for
the facts of this host (docs/adr/0190). Each line of the result is mapped to its line of the
template, so errors and sources name a line that a user can edit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from sidekick.expression import Facts
from wire.errors import ConfigError

SUFFIX = ".toml.j2"
RENDERED_MAX = 64 * 1024
"""Characters of the result; the same number as the bytes of a profile."""
_MARK = re.compile("\x01(\\d+)\x02")
_FILE = "<template>"
"""jinja2's name for a template without a file, in tracebacks."""


class TemplateLines:
    """Line of a rendered text → line of its template."""

    def __init__(self, lines: list[int]) -> None:
        self._lines = lines

    def find(self, line: int) -> int:
        """Return the template's line for a line of the result, both from 1."""
        return self._lines[min(line, len(self._lines)) - 1] if self._lines else 1

    def mapped(self, message: str) -> str:
        """Return a parser's message with the template's line, and without the column."""
        return re.sub(
            r"at line (\d+), column \d+", lambda m: f"at line {self.find(int(m[1]))}", message
        )


def render_template(path: str, text: str, facts: Facts) -> tuple[str, TemplateLines]:
    """Return the TOML of a template with these facts, and the origins of its lines.

    Raises `ConfigError`, with the line, if the template cannot be rendered; also if jinja2 is not
    installed.
    """
    try:
        import jinja2  # takes half of sidekick's start; only templates need it
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as e:
        raise ConfigError(
            f"profile {path} is a template, and jinja2 is not installed",
            hint="install jinja2, or write plain TOML with [[when]]",
        ) from e
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        extensions=[_line_marker()],
    )
    try:
        parts: list[str] = []
        size = 0
        for part in environment.from_string(text).generate(**_nested(facts)):
            size += len(part)
            if size > 2 * RENDERED_MAX:
                raise ConfigError(f"profile {path} renders to more than {RENDERED_MAX} characters")
            parts.append(part)
    except jinja2.TemplateSyntaxError as e:
        raise ConfigError(f"profile {path} is not a template: {e.message} (line {e.lineno})") from e
    except jinja2.UndefinedError as e:
        line = _line_of(e)
        raise ConfigError(
            f"profile {path} uses an unknown fact: {e}{line}", hint="see `sidekick facts`"
        ) from e
    except (jinja2.TemplateError, ArithmeticError, TypeError, ValueError, LookupError) as e:
        raise ConfigError(f"profile {path} cannot be rendered: {e}{_line_of(e)}") from e
    return _without_marks("".join(parts))


def _nested(facts: Facts) -> dict[str, Any]:
    """Return facts by their first name: `cpu.count` is the attribute `count` of `cpu`."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in facts.items():
        group, _, rest = name.partition(".")
        groups.setdefault(group, {})[rest] = value
    return {group: SimpleNamespace(**values) for group, values in groups.items()}


def _line_marker() -> Any:
    """Return an extension that writes the number of its line before each end of a line."""
    from jinja2.ext import Extension
    from jinja2.lexer import Token

    class Marker(Extension):
        def filter_stream(self, stream: Any) -> Iterator[Any]:
            for token in stream:
                if token.type != "data":
                    yield token
                    continue
                lines = token.value.split("\n")
                marked = [f"{line}\x01{token.lineno + n}\x02" for n, line in enumerate(lines[:-1])]
                yield Token(token.lineno, "data", "\n".join([*marked, lines[-1]]))

    return Marker


def _without_marks(text: str) -> tuple[str, TemplateLines]:
    lines, found = [], list[int]()
    for line in text.split("\n"):
        marks = _MARK.findall(line)
        found.append(int(marks[-1]) if marks else (found[-1] if found else 1))
        lines.append(_MARK.sub("", line))
    return "\n".join(lines), TemplateLines(found)


def _line_of(error: BaseException) -> str:
    import traceback

    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == _FILE]
    return f" (line {frames[-1].lineno})" if frames else ""
