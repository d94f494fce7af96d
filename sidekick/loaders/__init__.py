"""Boot loaders: each holds one entry of sidekick; the host's own entries stay unchanged.

A new entry is tried once, and becomes the default only after a healthy boot with it. After a failed
boot the host therefore boots its own line.
"""

from __future__ import annotations

from sidekick.loaders.direct import Direct
from sidekick.loaders.entry import Loader
from sidekick.loaders.grub import Grub
from sidekick.loaders.systemd_boot import SystemdBoot
from sidekick.setting import Host

LOADERS: tuple[Loader, ...] = (SystemdBoot(), Grub(), Direct())
"""In the order of the search; the last one fits every host."""


def find_loader(host: Host) -> Loader:
    """Return the boot loader of a host."""
    return next(loader for loader in LOADERS if loader.is_present(host))
