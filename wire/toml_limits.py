"""Limits of TOML texts, checked before they are parsed: Python's parser takes quadratic time for a
key of many parts (12 s for 20,000), and recurses into lists and tables.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_DEPTH = 32
MAX_DIGITS = 400
"""More digits than a number of 64 bits has, and fewer than Python refuses to parse."""
_PIECE = re.compile(
    r"""(?P<chain>(?:(?:"(?:\\.|[^"\\\n])*"|'[^'\n]*'|[\w+-]+)[ \t]*\.[ \t]*){33,})|"""
    r'''"""(?:\\.|[^\\])*?"""|'''
    r"'''.*?'''|"
    r""""(?:\\.|[^"\\\n])*"|'[^'\n]*'|#[^\n]*|[\[{]|[\]}]|\n|[\w+-]+(?:\s*\.\s*[\w+-]+)*""",
    re.DOTALL,
)


def find_excess(text: str) -> str | None:
    """Return what exceeds the limits of the parser, and where; None if nothing does."""
    depth = 0
    for found in _PIECE.finditer(text):
        piece = found[0]
        if piece in ("[", "{"):
            depth += 1
        elif piece in ("]", "}"):
            depth = max(0, depth - 1)
        elif found["chain"] is None and piece[0] in "\"'#":
            continue
        what = ""
        if depth > MAX_DEPTH or found["chain"] or piece.count(".") > MAX_DEPTH:
            what = f"it is nested deeper than {MAX_DEPTH}"
        elif len(piece) > MAX_DIGITS and re.search(rf"[\d_a-fA-F]{{{MAX_DIGITS}}}", piece):
            what = f"it has a number of more than {MAX_DIGITS} digits"
        if what:
            line = text.count("\n", 0, found.start()) + 1
            column = found.start() - text.rfind("\n", 0, found.start())
            return f"{what} (at line {line}, column {column})"
    return None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the plain values of a TOML text; raises `ValueError` or `RecursionError`."""
    if excess := find_excess(text):
        raise ValueError(excess)
    return tomllib.loads(text)
