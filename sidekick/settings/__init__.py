"""The kinds of settings, in the order in which they are applied (undo goes the other way).

First what others need: modules bring sysctls along, services would change values behind our backs,
threads decide which processors there are. Then what takes effect at once and is cheap to undo, then
huge pages, which may take a minute, then what only a boot brings. A new kind is a module here and a
line below (docs/settings.md). A kind is imported when a name of it is first met: a run pays for the
kinds of its profile, not for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module

from sidekick.setting import Setting, kind_of
from wire.errors import HostError

CLASSES = {
    "modules": "ModulesSetting",
    "services": "ServicesSetting",
    "smt": "SmtSetting",
    "sysctl": "SysctlSetting",
    "bpf": "BpfSetting",
    "affinity": "AffinitySetting",
    "power": "PowerSetting",
    "cstates": "CStatesSetting",
    "turbo": "TurboSetting",
    "prefetch": "PrefetchSetting",
    "thp": "TransparentHugepagesSetting",
    "block": "BlockSetting",
    "mounts": "MountsSetting",
    "scratch": "ScratchSetting",
    "nic": "NicSetting",
    "controllers": "ControllersSetting",
    "hugepages": "HugepagesSetting",
    "kernel": "KernelSetting",
}
"""The class of each kind, in the module of the kind's name."""


class _Kinds(Mapping[str, Setting]):
    """The kinds by name, each made when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Setting] = {}

    def __getitem__(self, kind: str) -> Setting:
        if kind not in self._made:
            name = CLASSES[kind]
            self._made[kind] = getattr(import_module(f"{__name__}.{kind}"), name)()
        return self._made[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in CLASSES  # that of a Mapping would import it

    def __iter__(self) -> Iterator[str]:
        return iter(CLASSES)

    def __len__(self) -> int:
        return len(CLASSES)


SETTINGS: Mapping[str, Setting] = _Kinds()


def setting_of(name: str) -> Setting:
    """Return the kind that a setting is of. Raises `HostError` for a newer sidekick's."""
    kind = kind_of(name)
    if kind not in SETTINGS:
        raise HostError(
            f"sidekick does not support settings of the kind {kind!r} ({name})",
            hint="a newer sidekick applied it: install that one again, and roll back with it",
        )
    return SETTINGS[kind]


def settings_of(names: Iterable[str]) -> list[Setting]:
    """Return the kinds that these settings are of, in the order in which they are applied.

    Raises `HostError` for a newer sidekick's.
    """
    found = {setting.kind: setting for setting in map(setting_of, names)}
    return [found[kind] for kind in SETTINGS if kind in found]
