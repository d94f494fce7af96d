"""The kinds of settings, in the order in which they are applied; undo uses the reverse order.

Kinds that others need come first: modules add sysctls, services could change values later, and SMT
determines the processors. Next are kinds that take effect at once and are cheap to undo, then huge
pages, which may take a minute, then kinds that need a boot. A new kind is a module here and a line
below (docs/settings.md). A kind is imported at its first use, so a run imports only the kinds of
its profile.
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
    """The kinds by name, each created at its first use."""

    def __init__(self) -> None:
        self._made: dict[str, Setting] = {}

    def __getitem__(self, kind: str) -> Setting:
        if kind not in self._made:
            name = CLASSES[kind]
            self._made[kind] = getattr(import_module(f"{__name__}.{kind}"), name)()
        return self._made[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in CLASSES  # the method of Mapping would import the kind

    def __iter__(self) -> Iterator[str]:
        return iter(CLASSES)

    def __len__(self) -> int:
        return len(CLASSES)


SETTINGS: Mapping[str, Setting] = _Kinds()


def setting_of(name: str) -> Setting:
    """Return the kind of a setting. Raises `HostError` for a kind of a newer sidekick."""
    kind = kind_of(name)
    if kind not in SETTINGS:
        raise HostError(
            f"sidekick does not support settings of the kind {kind!r} ({name})",
            hint="a newer sidekick applied it: install that one again, and roll back with it",
        )
    return SETTINGS[kind]


def settings_of(names: Iterable[str]) -> list[Setting]:
    """Return the kinds of these settings, in the order in which they are applied.

    Raises `HostError` for a kind of a newer sidekick.
    """
    kinds = {setting.kind: setting for setting in map(setting_of, names)}
    return [kinds[kind] for kind in SETTINGS if kind in kinds]
