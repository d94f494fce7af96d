"""The manual page, generated from the help of the commands (man(7), groff_man(7))."""

from __future__ import annotations

from collections.abc import Iterator

import click

EXIT_CODES = {
    "0": "done, or nothing to do",
    "1": (
        "error; also: a boot did not have its intended effect, or some changes could not be undone"
    ),
    "2": "changes pending, drift found, or lines that could not be converted",
    "3": "no such profile or setting",
    "4": "it failed, and all changes are undone",
    "5": "refused: the host does not support it, or a reboot would not apply it",
    "64": "usage",
    "75": "another sidekick is running",
    "77": "not root",
    "78": "bad profile or configuration",
}
FILES = {
    "/etc/twine/profiles": "profiles of the operator; they replace shipped ones of the same name",
    "/etc/twine/sidekick.toml": "configuration",
    "/var/lib/twine/sidekick": "original values, the applied profile, the last report, the history",
}


def page(group: click.Group) -> str:
    """Return the page of a command and all of its subcommands."""
    return "\n".join(_lines(group)) + "\n"


def _lines(group: click.Group) -> Iterator[str]:
    yield '.TH SIDEKICK 8 "" "Twine" "System administration"'
    yield ".SH NAME"
    yield f"sidekick \\- {_text(_first_line(group.help))}"
    yield ".SH SYNOPSIS"
    yield ".B sidekick\n[\\fIoptions\\fR] \\fIcommand\\fR [\\fIarguments\\fR]"
    yield ".SH OPTIONS"
    yield from _options(group)
    yield ".SH COMMANDS"
    for name in sorted(group.commands):
        command = group.commands[name]
        words = [_argument(param) for param in command.params]
        yield f".SS {_text(' '.join(['sidekick', name, *filter(None, words)]))}"
        yield _text(command.help or "")
        yield from _options(command)
    yield ".SH EXIT STATUS"
    for code, meaning in EXIT_CODES.items():
        yield f".TP\n.B {code}\n{_text(meaning)}"
    yield ".SH FILES"
    for path, meaning in FILES.items():
        yield f".TP\n.I {_text(path)}\n{_text(meaning)}"


def _options(command: click.Command) -> Iterator[str]:
    for option in command.params:
        if isinstance(option, click.Option):
            value = "" if option.is_flag else f" {(option.metavar or 'value').lower()}"
            yield f".TP\n.B {_text(', '.join(option.opts) + value)}\n{_text(option.help or '')}"


def _argument(param: click.Parameter) -> str:
    if not isinstance(param, click.Argument) or not param.name:
        return ""
    return f"[{param.name.upper()} ...]" if param.nargs == -1 else param.name.upper()


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0].rstrip(".")


def _text(text: str) -> str:
    """Return text escaped for the page, on one line."""
    return " ".join(text.replace("\\", "\\e").replace("-", "\\-").split())
