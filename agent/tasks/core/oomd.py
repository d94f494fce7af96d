"""Distinguishes tasks killed by systemd-oomd from those that reached their own limit (ADR 0122).

Pure. The result of both is `oom-kill`. Only the journal has the difference: the service manager
logs what systemd-oomd did to a unit, and systemd-oomd logs why. `tasks/oomd.py` reads it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agent.tasks.core.lifecycle import SeenUnit

OOMD_KILL = "oomd-kill"
"""Result of the end of a task that systemd-oomd killed."""
_NOTED = "d989611b15e44c9dbf31e3c81256e4ed"
"""MESSAGE_ID of the service manager's note on a unit (SD_MESSAGE_UNIT_OOMD_KILL)."""
_BEFORE_S = 60.0
"""Seconds before an end from which the log of systemd-oomd is searched."""
_KILLED = re.compile(r"Killed (/workload\.slice/\S+) due to (.+)")


def is_unclear(unit: SeenUnit) -> bool:
    """Return whether a unit ended for want of memory, and systemd does not say whose."""
    return unit.active == "failed" and unit.result == "oom-kill"


def what_ended(unit: SeenUnit, now: float) -> list[str]:
    """Return the command that prints what the journal has on the end of a unit."""
    note = ("_PID=1", f"MESSAGE_ID={_NOTED}", f"INVOCATION_ID={unit.invocation_id}", "+")
    return _journal((unit.exited_at or now) - _BEFORE_S, *note)


def what_was_done(now: float, within_s: float) -> list[str]:
    """Return the command that prints what systemd-oomd said in the last `within_s` seconds."""
    return _journal(now - within_s)


def _journal(since: float, *matches: str) -> list[str]:
    options = ("--no-pager", "--quiet", "--output=cat", f"--since=@{since:.0f}")
    return ["journalctl", *options, *matches, "_SYSTEMD_UNIT=systemd-oomd.service"]


def killed(said: str) -> dict[str, str]:
    """Return the cgroups of tasks that systemd-oomd killed → the reason in its log."""
    found = (_KILLED.fullmatch(line.strip()) for line in said.splitlines())
    return {line[1]: line[2] for line in found if line is not None}


def told_apart(unit: SeenUnit, name: str, said: str) -> SeenUnit:
    """Return the unit with how it ended; itself where the journal has nothing of systemd-oomd."""
    noted = any(line.startswith(f"{name}: systemd-oomd killed ") for line in said.splitlines())
    why = next((why for group, why in killed(said).items() if group.endswith(f"/{name}")), "")
    if not noted and not why:
        return unit
    more = f": {why}" if why else " (journalctl -u systemd-oomd)"
    reason = f"systemd-oomd killed it, since its host was short of memory{more}"
    return replace(unit, result=OOMD_KILL, why=reason)
