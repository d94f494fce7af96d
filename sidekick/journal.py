"""The journal: the steps of one run of sidekick, and its progress."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidekick.record import Record, Target
from sidekick.report import SettingChange


class Began(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    """First line of a journal: the target and the planned changes of the run."""

    command: str
    target: Target
    changes: tuple[SettingChange, ...]
    boot_id: str
    at: float
    number: int = 0
    """By which `Record.finished` names the run when it has ended; 0 in an earlier release."""


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag="planned"):
    """Further changes, planned during the run."""

    changes: tuple[SettingChange, ...]


class Wrote(msgspec.Struct, frozen=True, kw_only=True, tag="wrote"):
    """One change was made and read back."""

    setting: str


class Undoing(msgspec.Struct, frozen=True, kw_only=True, tag="undoing"):
    """The run failed, and its changes are undone from here on."""

    reason: str


class Undone(msgspec.Struct, frozen=True, kw_only=True, tag="undone"):
    """One change was undone."""

    setting: str


Step = Began | Planned | Wrote | Undoing | Undone


class Run(msgspec.Struct):
    """A run as its journal records it."""

    began: Began
    planned: int = 0
    wrote: int = 0
    undone: int = 0
    undoing: str | None = None

    def has_ended(self, record: Record) -> bool:
        """Return whether the run had stored its final record.

        A run may fail after that and be undone; its last record then has the failure.
        """
        if not self.began.number or self.began.number > record.finished:
            return False
        failure = record.failure
        return self.undoing is None or (failure is not None and failure.rolled_back)

    def describe(self, running: bool) -> str:
        """Return the progress of the run as text."""
        name = self.began.target.name or "the originals"
        if self.undoing is not None:
            action = f"undoing {name} ({self.undoing})"
            done = f"{self.undone} of {self.wrote} undone"
        else:
            action, done = f"applying {name}", f"{self.wrote} of {self.planned} written"
        return f"{action}: {done}" if running else f"interrupted while {action}: {done}"


def line_of(step: Step) -> str:
    """Return a step as a line of the journal."""
    return msgspec.json.encode(step).decode()


def _steps(lines: Sequence[bytes]) -> list[Step]:
    """Return the steps before the first incomplete line, which a power cut may leave."""
    steps: list[Step] = []
    for line in lines:
        try:
            steps.append(msgspec.json.decode(line, type=Step))
        except (msgspec.MsgspecError, UnicodeError):
            break
    return steps


def replay(lines: Sequence[bytes]) -> Run | None:
    """Return the run that a journal records; None without its first line."""
    steps = _steps(lines)
    if not steps or not isinstance(steps[0], Began):
        return None
    run = Run(began=steps[0], planned=len(steps[0].changes))
    for step in steps[1:]:
        match step:
            case Planned():
                run.planned += len(step.changes)
            case Wrote():
                run.wrote += 1
            case Undoing():
                run.undoing = step.reason
            case Undone():
                run.undone += 1
            case Began():
                break
    return run
