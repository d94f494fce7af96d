"""Types of command line options (sizes, durations, CPUs, parts), and former command names."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import click

from wire.errors import InvalidInput
from wire.units import CORES, DURATION, SIZE, Quantity


class _Option(click.ParamType[float]):
    """An option with a unit. The error for a bad value lists the accepted forms."""

    def __init__(self, quantity: Quantity, name: str) -> None:
        self._quantity = quantity
        self.name = name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        if not isinstance(value, str):
            return float(value)
        try:
            return self._quantity.read(value)
        except InvalidInput as e:
            self.fail(str(e), param, ctx)


def former_names(group: click.Group, *former: str) -> Callable[[click.Command], click.Command]:
    """Keep the former names of a command in `group`; help, manual and completion hide them."""

    def keep(command: click.Command) -> click.Command:
        for name in former:
            known = copy.copy(command)
            known.name, known.hidden = name, True
            group.add_command(known)
        return command

    return keep


class _Name(click.ParamType[str]):
    """The name of an object: at least one character that is not a space."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text."""
        if not str(value).strip():
            self.fail("it is empty; leave the option out for its default", param, ctx)
        return str(value)


def nonempty_name() -> click.ParamType[str]:
    """Return the type of an optional name that must not be empty.

    An empty value, for instance from an unset shell variable, is refused instead of being
    taken as the default (None).
    """
    return _Name()


class _Part(click.FloatRange):
    """A part of a whole, from 0 to 1. `nan` is refused: comparisons with a range miss it."""

    name = "part"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number from 0 to 1", param, ctx)
        return found


def part(*, of_some: bool = False) -> click.ParamType[float]:
    """Return the type of an option for a part of a whole: 0 to 1, above 0 with `of_some`."""
    return _Part(0, 1, min_open=of_some)


def size() -> click.ParamType[float]:
    """Return the type of an option for bytes: 48MiB, 1.5GiB; its values are whole."""
    return _Option(SIZE, "size")


def seconds() -> click.ParamType[float]:
    """Return the type of an option for a duration: 90s, 10m, 8h, 30d."""
    return _Option(DURATION, "duration")


def cores() -> click.ParamType[float]:
    """Return the type of an option for CPUs: 0.5, 2, 500m."""
    return _Option(CORES, "cpus")
