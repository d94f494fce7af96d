"""Reads JSON in which each key of an object is written once.

Decoders take the last of several values, so one of two equal keys would be lost without an error.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from wire.units import shown


class DuplicateKeyError(ValueError):
    """An object of a JSON document has a key twice."""


def json_with_unique_keys(text: str | bytes) -> Any:
    """Return a JSON document as plain values; `DuplicateKeyError` if an object has a key twice."""
    return json.loads(text, object_pairs_hook=_unique_pairs)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a table; `DuplicateKeyError` if a key is in it twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        duplicate = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise DuplicateKeyError(f"{shown(duplicate)} is written twice")
    return table
