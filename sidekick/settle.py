"""Writes values that limit or change each other, in an order that the kernel accepts.

The kernel checks a write against the values in force: it refuses a lower period while the runtime
is above it. Only the kernel has the dependencies between values, so an order is found by trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidekick.report import SettingChange
from wire.errors import TwineError

Write = Callable[[SettingChange], None]


def write_all(changes: Sequence[SettingChange], make: Write, take_back: Write | None) -> None:
    """Write all changes, in the given order where the kernel accepts it.

    Without `take_back` the changes do not depend on each other, and no other order is tried.
    A refused change is tried again after the others. A change that stays refused is written
    first, after the others were taken back. `make` raises for a refusal; that error is raised
    if no such order is accepted.
    """
    if take_back is None:
        for change in changes:
            make(change)
        return
    head, moved = list[SettingChange](), set[str]()
    while True:
        rest = [change for change in changes if change not in head]
        written, refused = in_passes(rest, make)
        if not refused:
            return
        stuck, error = refused[0]
        if not (head or written) or stuck.setting in moved:
            raise error
        for change in reversed([*head, *written]):
            take_back(change)
        moved.add(stuck.setting)
        head = [stuck]
        make(stuck)


def in_passes(
    changes: Sequence[SettingChange], make: Write
) -> tuple[list[SettingChange], list[tuple[SettingChange, TwineError]]]:
    """Make all changes, and the refused ones again, until a pass makes none.

    Returns what was made, in that order, and what stays refused.
    """
    written: list[SettingChange] = []
    pending = list(changes)
    while True:
        refused: list[tuple[SettingChange, TwineError]] = []
        for change in pending:
            try:
                make(change)
                written.append(change)
            except TwineError as e:
                refused.append((change, e))
        if not refused or len(refused) == len(pending):
            return written, refused
        pending = [change for change, _ in refused]
