"""Whether and how the host can be rebooted into a new kernel command line.

By kexec where there is a kernel to load: it needs no boot loader and skips the firmware. By
a full reboot only where a boot loader has the new line, since the host would otherwise come
back with the old one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from agent.errors import ConfigError, ProgramError, Unprocessable
from sidekick.setting import Host

CONFIG = "/etc/twine/sidekick.toml"
KEXEC = ("/usr/sbin/kexec", "/sbin/kexec")
GRUB_RESULT = "/boot/grub/grub.cfg"


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file `/etc/twine/sidekick.toml`; all of it may be left out."""

    kexec_kernel: str | None = None
    """Kernel image to load; by default the installed one of the running version."""
    kexec_initrd: str | None = None
    """Its initial RAM disk; with a `kexec_kernel` and none here, none is loaded."""


@dataclass(frozen=True, slots=True)
class Way:
    """How the host gets its new command line."""

    name: str
    kernel: str = ""
    initrd: str = ""
    loader_ready: bool = False
    """Whether the boot loader has the new line too."""


def read_config(host: Host) -> Config:
    """Return the configuration. Raises `ConfigError`."""
    text = host.fs.find(CONFIG)
    try:
        return msgspec.convert(tomllib.loads(text or ""), Config)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as e:
        raise ConfigError(f"cannot use {CONFIG}: {e}") from e


def choose(host: Host, config: Config, arguments: Sequence[str], gone: Sequence[str]) -> Way:
    """Return how to reboot into a line with `arguments` and without those in `gone`.

    Raises `Unprocessable` where the host would come back with its old line.
    """
    kernel, initrd, reason = _kexec(host, config)
    loader = _loader_lacks(host, arguments, gone)
    if not reason:
        return Way("kexec", kernel, initrd, loader_ready=not loader)
    if not loader:
        return Way("reboot", loader_ready=True)
    raise Unprocessable(
        f"no reboot: it would bring the old command line back ({loader}), and kexec is not "
        f"possible ({reason})",
        hint=f"name a kernel in {CONFIG} (kexec_kernel, kexec_initrd), or change the line in "
        "the boot loader and reboot by hand",
    )


def carry_out(host: Host, way: Way, line: str) -> None:
    """Start the reboot; returns while the host goes down. Raises `ProgramError`."""
    if way.name == "reboot":
        host.processes.run(["systemctl", "reboot"])
        return
    load = ["kexec", "-l", way.kernel, f"--command-line={line}"]
    if way.initrd:
        load.append(f"--initrd={way.initrd}")
    try:
        host.processes.run(load, timeout_s=120.0)
    except ProgramError as e:
        if not way.loader_ready:
            e.hint = "the kernel may refuse kexec (Secure Boot); no boot loader has the line"
            raise
        host.processes.run(["systemctl", "reboot"])
        return
    host.processes.run(["systemctl", "kexec"])


def _kexec(host: Host, config: Config) -> tuple[str, str, str]:
    """Return kernel and initial RAM disk to load, and why that cannot be done if so."""
    version = host.hardware.kernel
    kernel = config.kexec_kernel or f"/boot/vmlinuz-{version}"
    initrd = config.kexec_initrd or ("" if config.kexec_kernel else f"/boot/initrd.img-{version}")
    if host.fs.find("/proc/sys/kernel/kexec_load_disabled") == "1":
        return kernel, initrd, "it is switched off until the next boot"
    if not any(host.fs.exists(path) for path in KEXEC):
        return kernel, initrd, "the program kexec is not installed"
    for path in filter(None, (kernel, initrd)):
        if not host.fs.exists(path):
            return kernel, initrd, f"there is no {path}"
    return kernel, initrd, ""


def _loader_lacks(host: Host, arguments: Sequence[str], gone: Sequence[str]) -> str:
    menu = host.fs.find(GRUB_RESULT)
    if menu is None:
        return "no boot loader was updated"
    words = menu.split()
    wrong = [a for a in arguments if a not in words] + [a for a in gone if a in words]
    return f"{GRUB_RESULT} is not up to date for {' '.join(wrong)}" if wrong else ""
