"""Writes values that limit or change each other, in an order that the kernel accepts.

The kernel checks a write against the values in force: it refuses a lower period while the runtime
is above it. Only the kernel has the dependencies between values, so an order is found by trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidekick.report import SettingChange
from wire.errors import TwineError

Write = Callable[[SettingChange], None]


def write_all(changes: Sequence[SettingChange], apply: Write, undo: Write | None) -> None:
    """Write all changes, in the given order where the kernel accepts it.

    Without `undo` the changes do not depend on each other, and no other order is tried.
    A refused change is tried again after the others. A change that stays refused is written
    first, after the others were undone. `apply` raises for a refusal; that error is raised
    if no such order is accepted.
    """
    if undo is None:
        for change in changes:
            apply(change)
        return
    first, moved_first = list[SettingChange](), set[str]()
    while True:
        rest = [change for change in changes if change not in first]
        written, refused = call_in_passes(rest, apply)
        if not refused:
            return
        refused_change, error = refused[0]
        if not (first or written) or refused_change.setting in moved_first:
            raise error
        for change in reversed([*first, *written]):
            undo(change)
        moved_first.add(refused_change.setting)
        first = [refused_change]
        apply(refused_change)


def call_in_passes(
    changes: Sequence[SettingChange], call: Write
) -> tuple[list[SettingChange], list[tuple[SettingChange, TwineError]]]:
    """Call `call` with each change, and again with the refused ones, until a pass accepts none.

    Returns the accepted changes in that order, and the refused ones with their errors.
    """
    written: list[SettingChange] = []
    pending = list(changes)
    while True:
        refused: list[tuple[SettingChange, TwineError]] = []
        for change in pending:
            try:
                call(change)
                written.append(change)
            except TwineError as e:
                refused.append((change, e))
        if not refused or len(refused) == len(pending):
            return written, refused
        pending = [change for change, _ in refused]
