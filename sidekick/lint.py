"""Reports all errors of profiles at once, before a host is changed.

An error is what `apply-profile` would refuse on any host. A note is what only this host does not
support, or a value that a parent sets already: a later change may miss one of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from sidekick.expression import Facts
from sidekick.profile import Library, Profile
from sidekick.setting import Host
from sidekick.settings import setting_of, settings_of
from sidekick.sysctl_ranges import why_out_of_range
from sidekick.targets import target_of
from sidekick.template import SUFFIX
from wire.errors import ConfigError, TwineError, Unprocessable


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    NOTE = "note"


class Finding(msgspec.Struct, frozen=True):
    """One error or note about a profile."""

    profile: str
    severity: Severity
    field: str
    reason: str


def lint_profiles(
    library: Library, names: Sequence[str], facts: Facts, host: Host
) -> list[Finding]:
    """Return the errors and notes of these profiles, in the order of `names`."""
    return [finding for name in names for finding in _findings_of(library, name, facts, host)]


def _findings_of(library: Library, name: str, facts: Facts, host: Host) -> list[Finding]:
    try:
        profile = library.load(name, facts)
        target = target_of(profile, host)
    except ConfigError as e:
        errors = [(each.field, each.reason) for each in e.errors] or [("", str(e))]
        return [Finding(name, Severity.ERROR, field, reason) for field, reason in errors]
    except Unprocessable as e:
        return [Finding(name, Severity.NOTE, "", f"not on this host: {e}")]
    except TwineError as e:
        return [Finding(name, Severity.ERROR, "", str(e))]
    findings = [
        Finding(name, Severity.ERROR, w.setting, f"{reason} ({w.source})")
        for w in target.wanted
        if (reason := why_out_of_range(w.setting.removeprefix("sysctl."), w.value))
    ]
    findings += [
        Finding(name, Severity.NOTE, "", f"{text.path} is a template, checked as rendered here")
        for text in profile.texts
        if text.path.endswith(SUFFIX)
    ]
    findings += [
        Finding(name, Severity.NOTE, setting, f"repeats a setting of {source}")
        for setting, source in _repeated_settings(library, profile, facts)
    ]
    absent = {
        w.setting: w
        for setting in settings_of(w.setting for w in target.wanted)
        for w in target.wanted
        if setting.owns(w.setting) and setting.observe(host, [w.setting]).get(w.setting) is None
    }
    for each in absent.values():
        setting = setting_of(each.setting)
        effect = "cannot be applied here" if each.required else "unsupported here"
        reason = f"{effect}: {setting.why_missing(each.setting)} ({each.source})"
        findings.append(Finding(name, Severity.NOTE, each.setting, reason))
    return findings


def _repeated_settings(library: Library, profile: Profile, facts: Facts) -> list[tuple[str, str]]:
    """Return the settings that a profile sets to its parent's value, with the parent's place."""
    if len(profile.lineage) < 2:
        return []
    try:
        parent = library.load(profile.lineage[1], facts)
    except TwineError:
        return []
    repeated = []
    for kind, table in profile.sections.items():
        parents = _table_pairs(parent.sections.get(kind))
        for key, value in _table_pairs(table).items():
            name = f"{kind}.{key}"
            own = profile.sources.get(name, "").partition(":")[0] == profile.name
            if own and name in parent.sources and parents.get(key) == value:
                repeated.append((name, parent.sources[name]))
    return repeated


def _table_pairs(table: object) -> dict[str, object]:
    if isinstance(table, dict):
        return table
    return msgspec.structs.asdict(table) if isinstance(table, msgspec.Struct) else {}
