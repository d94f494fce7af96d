"""Explains the value of a setting: the profile line that sets it, and the value before."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

import msgspec

from sidekick.profile import Profile
from sidekick.record import Record
from sidekick.report import Disruption, ProfileText, WantedSetting
from sidekick.setting import Host
from sidekick.settings import setting_of
from wire.errors import NotFound

SYSCTL_PAGES = {
    "kernel": "admin-guide/sysctl/kernel.rst",
    "vm": "admin-guide/sysctl/vm.rst",
    "fs": "admin-guide/sysctl/fs.rst",
    "user": "admin-guide/sysctl/user.rst",
    "net.ipv4": "networking/ip-sysctl.rst",
    "net.ipv6": "networking/ip-sysctl.rst",
    "net": "admin-guide/sysctl/net.rst",
}
"""Below the kernel's Documentation, the longest beginning first where several fit."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """The values, the source and the documentation of one setting of a profile."""

    setting: str
    profile: str
    wanted: str
    required: bool
    source: str
    """File and line."""
    text: list[str]
    """The comment above that line, and the line."""
    now: str | None
    """None where this host lacks it."""
    lacking: str
    """Why this host lacks it; empty if it does not."""
    original: str | None
    """What it was before the first profile, None where no profile has set it."""
    needs: Disruption
    documents: str
    """Where the kernel documents it."""


def explain_setting(
    host: Host,
    profile: Profile,
    wanted: Sequence[WantedSetting],
    record: Record,
    name: str,
) -> Explanation:
    """Return why a setting has its value. Raises `NotFound` where the profile does not set it."""
    chosen = next((w for w in wanted if w.setting in (name, f"sysctl.{name}")), None)
    if chosen is None:
        part = name.rpartition(".")[2]
        near = sorted(w.setting for w in wanted if part and part in w.setting)
        hint = (
            f"near: {', '.join(near[:5])}" if near else f"`sidekick show {profile.name}` lists all"
        )
        raise NotFound(f"profile {profile.name} has no setting {name}", hint=hint)
    setting = setting_of(chosen.setting)
    now = setting.observe(host, [chosen.setting]).get(chosen.setting)
    return Explanation(
        setting=chosen.setting,
        profile=profile.name,
        wanted=chosen.value,
        required=chosen.required,
        source=chosen.source,
        text=_lines_of(profile.texts, chosen.source),
        now=now,
        lacking="" if now is not None else setting.why_missing(chosen.setting),
        original=record.originals.get(chosen.setting),
        needs=setting.needs(chosen.setting),
        documents=_documents(chosen.setting),
    )


def _lines_of(texts: Iterable[ProfileText], source: str) -> list[str]:
    """Return the line of a profile that a source names, and the comment right above it."""
    name, _, number = source.partition(":")
    text = next((each.text for each in texts if each.name == name), None)
    if text is None or not number.isdigit():
        return []
    lines = text.split("\n")[: int(number)]
    first = len(lines) - 1
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return [line.strip() for line in lines[first:]]


def _documents(setting: str) -> str:
    kind, _, name = setting.partition(".")
    if kind == "sysctl":
        areas = sorted(SYSCTL_PAGES, key=len, reverse=True)
        page = next((SYSCTL_PAGES[a] for a in areas if name.startswith(f"{a}.")), "")
        return f"Linux, Documentation/{page}, {name.rpartition('.')[2]}" if page else ""
    module = type(setting_of(setting)).__module__
    doc = " ".join((sys.modules[module].__doc__ or "").split())
    found = re.search(r"Source(?: of [a-z ]+)?: (.*)$", doc)
    return found[1] if found else ""
