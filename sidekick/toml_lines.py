"""Finds the line of each value of a TOML file, which the parser of the standard library omits.

Also finds nesting that is too deep for that parser, and numbers that are too long for it. Reads
only the part of the language that this needs: headers of tables, and keys at the begin of a line.
Values within an inline table, or within a list of one line, get the line of their key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_KEYS = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_TABLE = re.compile(rf"\s*(\[\[?)\s*({_KEYS})\s*\]\]?\s*(?:#.*)?")
_PAIR = re.compile(rf"\s*({_KEYS})\s*=\s*(.*)")
_MEMBER = re.compile(r"""\s*(?:"[^"\n]*"|'[^'\n]*'|[\w.+-]+)\s*,?\s*(?:#.*)?""")


class TomlLines:
    """The lines of one file, by path: `("when", 0, "sysctl", "vm.swappiness")`."""

    def __init__(self, text: str) -> None:
        """Read the text of a file."""
        self._lines: dict[tuple[str | int, ...], int] = {}
        self._arrays: dict[str, int] = {}
        table: tuple[str | int, ...] = ()
        key: tuple[str | int, ...] = ()
        members = -1
        for number, line in enumerate(text.split("\n"), start=1):
            header, pair = _TABLE.fullmatch(line), _PAIR.fullmatch(line)
            if members >= 0 and not pair and not header:
                if _MEMBER.fullmatch(line):
                    self._lines.setdefault((*key, members), number)
                    members += 1
                continue
            members = -1
            if header:
                table = self._table_path(_names(header[2]), many=header[1] == "[[")
                self._lines.setdefault(table, number)
            elif pair:
                key = (*table, *_names(pair[1]))
                self._lines.setdefault(key, number)
                members = 0 if pair[2].partition("#")[0].strip() == "[" else -1

    def find(self, path: Sequence[str | int]) -> int:
        """Return the line of the value at a path, or of the nearest table around it; else 1."""
        parts = (tuple(path[:n]) for n in range(len(path), 0, -1))
        return next((self._lines[p] for p in parts if p in self._lines), 1)

    def _table_path(self, names: tuple[str, ...], *, many: bool) -> tuple[str | int, ...]:
        first = names[0]
        if many and len(names) == 1:
            self._arrays[first] = self._arrays.get(first, -1) + 1
        if first in self._arrays:
            return (first, self._arrays[first], *names[1:])
        return names


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip("\"'") for name in re.findall(_KEY, text))
