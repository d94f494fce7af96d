"""Distinguishes tasks killed by systemd-oomd from those that reached their own limit (ADR 0122).

Pure. The result of both is `oom-kill`. Only the journal shows the difference: systemd logs that
systemd-oomd killed a unit, and systemd-oomd logs why. `tasks/oomd.py` reads the journal.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agent.tasks.core.exits import OOM_KILL
from agent.tasks.core.lifecycle import ObservedUnit

OOMD_KILL = "oomd-kill"
"""Result of the end of a task that systemd-oomd killed."""
_KILL_MESSAGE_ID = "d989611b15e44c9dbf31e3c81256e4ed"
"""MESSAGE_ID with which systemd logs such a kill (SD_MESSAGE_UNIT_OOMD_KILL)."""
_SEARCH_BEFORE_END_S = 60.0
"""The log of systemd-oomd is searched from this many seconds before the end of the unit. It is not
searched from before the start of the unit, because it names units without their invocation."""
_KILLED = re.compile(r"Killed (/workload\.slice/\S+) due to (.+)")


def may_be_oomd(unit: ObservedUnit) -> bool:
    """Return whether a unit ended for lack of memory: its own limit or the host's memory."""
    return unit.active == "failed" and unit.result == OOM_KILL


def end_log_command(unit: ObservedUnit, now: float) -> list[str]:
    """Return the command that prints the journal's entries on the end of a unit."""
    note = ("_PID=1", f"MESSAGE_ID={_KILL_MESSAGE_ID}", f"INVOCATION_ID={unit.invocation_id}", "+")
    since = (unit.exited_at or now) - _SEARCH_BEFORE_END_S
    return _journal(max(since, unit.started_at or 0.0), *note)


def kill_log_command(now: float, within_s: float) -> list[str]:
    """Return the command that prints the log of systemd-oomd of the last `within_s` seconds."""
    return _journal(now - within_s)


def _journal(since: float, *matches: str) -> list[str]:
    options = ("--no-pager", "--quiet", "--output=cat", f"--since=@{since:.3f}")
    return ["journalctl", *options, *matches, "_SYSTEMD_UNIT=systemd-oomd.service"]


def killed(log: str) -> dict[str, str]:
    """Return the cgroup of each task that systemd-oomd killed → the reason in its log."""
    matches = (_KILLED.fullmatch(line.strip()) for line in log.splitlines())
    return {line[1]: line[2] for line in matches if line is not None}


def with_oomd_end(unit: ObservedUnit, name: str, log: str) -> ObservedUnit:
    """Return the unit as killed by systemd-oomd; unchanged if the log does not mention that."""
    noted = any(line.startswith(f"{name}: systemd-oomd killed ") for line in log.splitlines())
    why = next((why for group, why in killed(log).items() if group.endswith(f"/{name}")), "")
    if not noted and not why:
        return unit
    more = f": {why}" if why else " (journalctl -u systemd-oomd)"
    reason = f"systemd-oomd killed it, since its host was short of memory{more}"
    return replace(unit, result=OOMD_KILL, why=reason)
