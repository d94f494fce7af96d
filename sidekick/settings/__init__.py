"""The kinds of settings, in the order in which they are applied (undo goes the other way).

First what others need: modules bring sysctls along, services would change values behind our backs,
threads decide which processors there are. Then what takes effect at once and is cheap to undo, then
huge pages, which may take a minute, then what only a boot brings. A new kind is a module here and a
line below (docs/settings.md).
"""

from __future__ import annotations

from agent.errors import HostError
from sidekick.setting import Setting, kind_of
from sidekick.settings.affinity import AffinitySetting
from sidekick.settings.block import BlockSetting
from sidekick.settings.bpf import BpfSetting
from sidekick.settings.controllers import ControllersSetting
from sidekick.settings.cstates import CStatesSetting
from sidekick.settings.hugepages import HugepagesSetting
from sidekick.settings.kernel import KernelSetting
from sidekick.settings.modules import ModulesSetting
from sidekick.settings.mounts import MountsSetting
from sidekick.settings.nic import NicSetting
from sidekick.settings.power import PowerSetting
from sidekick.settings.prefetch import PrefetchSetting
from sidekick.settings.scratch import ScratchSetting
from sidekick.settings.services import ServicesSetting
from sidekick.settings.smt import SmtSetting
from sidekick.settings.sysctl import SysctlSetting
from sidekick.settings.thp import TransparentHugepagesSetting
from sidekick.settings.turbo import TurboSetting

SETTINGS: tuple[Setting, ...] = (
    ModulesSetting(),
    ServicesSetting(),
    SmtSetting(),
    SysctlSetting(),
    BpfSetting(),
    AffinitySetting(),
    PowerSetting(),
    CStatesSetting(),
    TurboSetting(),
    PrefetchSetting(),
    TransparentHugepagesSetting(),
    BlockSetting(),
    MountsSetting(),
    ScratchSetting(),
    NicSetting(),
    ControllersSetting(),
    HugepagesSetting(),
    KernelSetting(),
)


def setting_of(name: str) -> Setting:
    """Return the kind that a setting is of. Raises `HostError` for a newer sidekick's."""
    kind = kind_of(name)
    found = next((setting for setting in SETTINGS if setting.kind == kind), None)
    if found is None:
        raise HostError(
            f"sidekick knows no settings of the kind {kind!r} ({name})",
            hint="a newer sidekick applied it: install that one again, and roll back with it",
        )
    return found
