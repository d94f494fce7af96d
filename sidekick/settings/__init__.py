"""The kinds of settings, in the order in which they are applied.

First what takes effect at once and is cheap to undo, then huge pages, which may fall back
on the kernel command line, and that last: it is only staged.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidekick.setting import Setting
from sidekick.settings.hugepages import HugepagesSetting
from sidekick.settings.kernel import KernelSetting
from sidekick.settings.sysctl import SysctlSetting
from sidekick.state import OwnedArgument


def all_settings(owned: Sequence[OwnedArgument]) -> tuple[Setting, ...]:
    """Return every kind; `owned` are the command line arguments that are ours."""
    return (SysctlSetting(), HugepagesSetting(), KernelSetting(tuple(owned)))
