"""Boot loaders: each can hold one entry of ours next to the host's own, which stays unchanged.

A new entry is tried once; it becomes the default only after a boot with it was healthy. A boot
that fails is therefore followed by one with the host's own line.
"""

from __future__ import annotations

from sidekick.loaders.direct import Direct
from sidekick.loaders.entry import Loader
from sidekick.loaders.grub import Grub
from sidekick.loaders.systemd_boot import SystemdBoot
from sidekick.setting import Host

LOADERS: tuple[Loader, ...] = (SystemdBoot(), Grub(), Direct())
"""In the order in which they are searched for; the last one is always there."""


def find(host: Host) -> Loader:
    """Return the boot loader of a host."""
    return next(loader for loader in LOADERS if loader.is_there(host))
