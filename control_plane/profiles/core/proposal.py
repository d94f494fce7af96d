"""Checks a profile that an owner proposes, before any machine is changed; reports all errors.

It refuses settings that no host could apply or that the owner may not set. The host decides in the
end: sidekick reads the file by the same rules, and with the facts of the host.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

from wire.errors import FieldError
from wire.toml_limits import parse_toml

_HEADER = frozenset({"description", "extends", "version", "owner", "fits"})
_WHOLE_NAMES = frozenset({"sysctl"})
"""Tables whose keys are whole names that may contain dots: `sysctl."net.core.somaxconn"`."""
MAX_ERRORS = 20


def check_text(text: str, extends: str, allowed: Sequence[str]) -> list[FieldError]:
    """Return why a text cannot be the profile of an entitlement that runs `extends`.

    `allowed` are patterns of the settings that it may contain: `sysctl.net.*`.
    """
    try:
        document = parse_toml(text)
    except (ValueError, RecursionError) as e:
        return [FieldError(field="text", reason=f"it is not TOML: {e}")]
    errors = []
    if not isinstance(document.get("description"), str):
        errors.append(FieldError(field="description", reason="a sentence is missing"))
    if document.get("extends") != extends:
        reason = f"it must extend {extends!r}, the profile of the entitlement's machines"
        errors.append(FieldError(field="extends", reason=reason))
    known = ", ".join(allowed) or "nothing"
    for name in dict.fromkeys(_settings(document)):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed):
            reason = f"owners may not set it; they may set {known}"
            errors.append(FieldError(field=name, reason=reason))
    return errors[:MAX_ERRORS]


def _settings(document: dict[str, Any]) -> Iterator[str]:
    """Yield the names of all settings in a profile, including those under conditions."""
    for key, value in document.items():
        if key == "when":
            for block in value if isinstance(value, list) else [value]:
                if isinstance(block, dict):
                    yield from _settings({k: v for k, v in block.items() if k != "if"})
        elif key in _HEADER:
            continue
        elif isinstance(value, dict) and value:
            for name, inner in value.items():
                if key in _WHOLE_NAMES or not isinstance(inner, dict):
                    yield f"{key}.{name}"
                else:
                    yield from (f"{key}.{name}.{deep}" for deep in inner or ("",))
        else:
            yield key
