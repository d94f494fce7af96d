"""Reads a program's configuration file, and reports all its errors at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from wire.errors import ConfigError, FieldError
from wire.quantity_fields import TEXT_ENCODING, parse_quantities
from wire.toml_limits import parse_toml
from wire.violations import violations

T = TypeVar("T")
Relation = Callable[[dict[str, Any]], Iterable[FieldError]]
_LISTEN = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]]*)):(?P<port>\d{1,5})")


def read_config(path: Path, kind: type[T]) -> T:
    """Return the configuration of a TOML file, or raise `ConfigError` with all its errors."""
    return config_of(read_toml(path), kind, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the plain values of a TOML file, or raise `ConfigError`."""
    try:
        return parse_toml(path.read_text(TEXT_ENCODING))
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"{path} is not TOML: {e}") from e


def config_of(document: Any, kind: type[T], name: str, relations: Sequence[Relation] = ()) -> T:
    """Return the configuration of plain values, or raise `ConfigError` with all errors.

    `name` is that of the document in errors; `relations` return contradictions between fields.
    """
    document = parse_quantities(document, kind)
    errors = [*violations(document, kind), *(e for of in relations for e in of(document))]
    if errors:
        listed = "; ".join(f"{e.field}: {e.reason}" for e in errors)
        raise ConfigError(f"{name} is not valid: {listed}", errors=tuple(errors))
    return msgspec.convert(document, kind)


def listen_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; no host means all addresses. Raises `ConfigError`."""
    match = _LISTEN.fullmatch(text)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigError(
            f"cannot listen on {text!r}: not HOST:PORT", hint="for instance 0.0.0.0:7440"
        )
    return match["v6"] or match["host"] or "0.0.0.0", int(match["port"])
