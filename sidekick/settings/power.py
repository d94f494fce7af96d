"""Frequency governor and energy preference, of all processors at once.

A profile names several governors, best first; those that the driver does not offer are skipped. A
host that offers none of them reports what it offers. The governor `performance` sets the energy
preference to `performance`, and the kernel refuses another one (EBUSY) while it is in force. So the
governor is written before the preference, also when originals are restored. Source: Linux,
Documentation/admin-guide/pm/cpufreq.rst, intel_pstate.rst and amd-pstate.rst (energy performance
preference); drivers/cpufreq/intel_pstate.c and amd-pstate.c.
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from sidekick.cpulists import CPUS, join_values, split_values
from sidekick.facts import frequency_policies
from sidekick.profile import Profile
from sidekick.report import WantedSetting
from sidekick.setting import Host
from sidekick.settings.leading import LeadingSetting
from wire.errors import FieldError

_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")
FILES = {
    "governor": ("scaling_governor", "scaling_available_governors"),
    "energy_preference": (
        "energy_performance_preference",
        "energy_performance_available_preferences",
    ),
}


class PowerFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [power] table."""

    # Words are checked by `check` and not by their type: msgspec 0.22 frees a type `W | list[W]`
    # wrongly where W has a pattern, and the process dies at its end, if not before.
    governor: str | list[str] | None = None
    """The kernel's governor that chooses the frequency, or several of them, best first."""
    energy_preference: str | list[str] | None = None
    """The preference of the processor between `performance` and `power`."""
    required: bool = False
    """Whether a host that offers none of them cannot run the profile."""


class PowerSetting(LeadingSetting):
    """One value for all frequency policies, or one for each where they differ."""

    kind: ClassVar[str] = "power"
    section: ClassVar[type[PowerFiles]] = PowerFiles

    def check(self, profile: Profile) -> list[FieldError]:
        """Return an error for each malformed value."""
        table: PowerFiles = profile.sections[self.kind]
        errors = []
        for key in FILES:
            given = getattr(table, key)
            names = [given] if isinstance(given, str) else given
            if names is not None and not (names and all(map(_WORD.fullmatch, names))):
                where = profile.source_of(f"power.{key}")
                reason = f"{given!r} is not a word or a list of words ({where})"
                errors.append(FieldError(field=f"power.{key}", reason=reason))
        return errors

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:
        """Return the first of the values that this host offers.

        Where it offers none the name contains the missing choice, so that reading it finds nothing.
        """
        wanted = []
        for key in FILES:
            choices = getattr(profile.sections[self.kind], key)
            if choices is None:
                continue
            names = [choices] if isinstance(choices, str) else choices
            offered = _offered_by_all(host, key)
            value = next((n for n in names if n in offered), None)
            name = f"power.{key}" if value or not offered else f"power.{key}:{names[0]}"
            wanted.append(self.value_of(profile, key, value or names[0], name))
        return wanted

    def partners(self, setting: str) -> tuple[str, ...]:
        """Return the energy preference, which the governor `performance` changes."""
        return ("power.energy_preference",) if setting == "power.governor" else ()

    def touches(self, setting: str) -> tuple[str, ...]:
        """Return the attribute of the policies."""
        return (f"{CPUS}/cpufreq/{_key_and_choice(setting)[0]}",)

    def why_missing(self, setting: str) -> str:
        """Return why a host does not have it."""
        key, choice = _key_and_choice(setting)
        if choice:
            return f"its frequency driver does not offer {key} {choice}"
        return f"this kernel has no frequency driver with a choice of {key}; guests have none"

    def read(self, host: Host, setting: str) -> str | None:
        """Return the value of the policies."""
        key, choice = _key_and_choice(setting)
        if choice:
            return None
        values = {n: host.fs.find(_path(n, FILES[key][0])) for n in frequency_policies(host.fs)}
        return join_values({n: v for n, v in values.items() if v}) or None

    def write(self, host: Host, setting: str, value: str) -> None:
        """Set the value of every policy that has another one."""
        file = FILES[_key_and_choice(setting)[0]][0]
        for number, word in split_values(value, frequency_policies(host.fs)).items():
            if host.fs.read(_path(number, file)) != word:
                host.fs.write(_path(number, file), word)


def _key_and_choice(setting: str) -> tuple[str, str]:
    """Return the key, and the choice in the name that the host does not offer; empty: none."""
    key, _, choice = setting.removeprefix("power.").partition(":")
    return key, choice


def _offered_by_all(host: Host, key: str) -> set[str]:
    """Return what every policy offers."""
    files = (_path(n, FILES[key][1]) for n in frequency_policies(host.fs))
    each = [set((host.fs.find(file) or "").split()) for file in files]
    return set.intersection(*each) if each else set()


def _path(policy: int, file: str) -> str:
    return f"{CPUS}/cpufreq/policy{policy}/{file}"
