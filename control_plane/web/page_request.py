"""What a page of the console is declared with, and what one request for it contains."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from control_plane.web.calls import RouteCalls, SharedAnswers
from control_plane.web.core.usage import UsageHistory
from control_plane.web.services import ServiceReader
from wire.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The path, parameters and services of one request for a page."""

    api: RouteCalls
    path: Mapping[str, str]
    query: Mapping[str, str]
    now: float
    shared: SharedAnswers
    history: UsageHistory
    services: ServiceReader
    as_data: bool = False
    """The page is asked for as JSON."""

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return a parameter that has one of some values; the first is the default."""
        value = self.query.get(name) or allowed[0]
        if value not in allowed:
            raise InvalidInput(f"parameter {name} is one of {', '.join(allowed)}, not {value!r}")
        return value

    def number(self, name: str, most: int = 1_000_000) -> int:
        """Return a parameter that is a whole number from 0 on; 0 if it is absent."""
        text = self.query.get(name) or "0"
        is_number = text.isascii() and text.isdecimal() and len(text) <= 18
        if not is_number or int(text) > most:
            raise InvalidInput(f"parameter {name} is a number from 0 to {most}, not {text[:20]!r}")
        return int(text)


Load = Callable[[PageRequest], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Page:
    """One page; `parameters` are those of its query besides `format`.

    The answer of a shared page is computed once for all viewers (`calls.SharedAnswers`).
    """

    path: str
    template: str
    load: Load
    parameters: tuple[str, ...] = ()
    is_shared: bool = False
