"""Whether and how the host can be rebooted into a new kernel command line.

Sidekick uses kexec if there is a kernel to load: kexec needs no boot loader and skips the firmware,
and after a failure the host boots its own line. Otherwise it uses a boot loader that can try an
entry once. It refuses a reboot that would restore the old line, and repeated reboots.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from sidekick.boot import BootLine, WantedBoot
from sidekick.bootline import GUARD, VERSION
from sidekick.observe import HostObservation, tasks_of
from sidekick.record import Attempt, Failure, Rebooted, Record, Target, failure_of
from sidekick.report import Report
from sidekick.setting import Host
from sidekick.state import StateFolder
from wire.errors import ConfigError, HostError, ProgramError, Unprocessable
from wire.toml_limits import parse_toml

CONFIG = "/etc/twine/sidekick.toml"
KEXEC = ("/usr/sbin/kexec", "/sbin/kexec")
MAX_REBOOTS = 3
WINDOW_S = 3600.0
"""At most 3 reboots in this time, in seconds: a caller may request reboots in a loop."""
RecordedReboots = tuple[Rebooted | float, ...]


class RebootConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file `/etc/twine/sidekick.toml`; all of it may be left out."""

    kexec_kernel: str | None = None
    """Kernel image to load; by default the installed one of the version that must run."""
    kexec_initrd: str | None = None
    """Its initial RAM disk; with a `kexec_kernel` and none here, none is loaded."""
    repair_drift: bool = False
    """Whether `sidekick verify --timer` restores values changed by hand, or only reports them."""


class RebootMethod(msgspec.Struct, frozen=True):
    """How the host gets its new command line."""

    name: str
    """`kexec` or `reboot`."""
    kernel: str = ""
    initrd: str = ""
    once: bool = False
    """Whether the boot loader must be set to try our entry once."""


def read_config(host: Host) -> RebootConfig:
    """Return the configuration. Raises `ConfigError`."""
    text = host.fs.find(CONFIG)
    try:
        return msgspec.convert(parse_toml(text or ""), RebootConfig)
    except (ValueError, RecursionError) as e:  # a ValidationError is a ValueError
        raise ConfigError(f"cannot use {CONFIG}: {e}") from e


def recent(host: Host, reboots: RecordedReboots) -> RecordedReboots:
    """Return the reboots within the last hour, which count against the next one.

    The age of a reboot is the sum of the uptimes since: after a boot the clock may be wrong. For
    reboots that an earlier release recorded only the time is known; a time in the future counts.
    """
    counted: list[Rebooted | float] = []
    since_s = host.monotonic()
    for reboot in reversed(reboots):
        if isinstance(reboot, Rebooted):
            if reboot.boot_id == host.hardware.boot_id:
                continue  # requested, but it did not happen
            counted += [reboot] if since_s < WINDOW_S else []
            since_s += reboot.uptime_s
        elif host.now() - reboot < WINDOW_S:
            counted.append(reboot)
    return tuple(reversed(counted))


def with_this_boot(host: Host, reboots: RecordedReboots) -> RecordedReboots:
    """Return the recent reboots and, once, the end of this boot."""
    ends = Rebooted(boot_id=host.hardware.boot_id, uptime_s=host.monotonic())
    return (*recent(host, reboots), ends)


def failed_attempt(target: Target, attempt: Attempt) -> Failure:
    """Return the failure of a target whose reboot did not have its effect."""
    reason = (
        f"the host was rebooted for it ({attempt.way}) and came back without "
        f"{attempt.purpose}; sidekick does not reboot it again"
    )
    return failure_of(target, reason, rolled_back=False)


def begin(
    host: Host,
    state: StateFolder,
    record: Record,
    observation: HostObservation,
    purpose: str,
    report: Report,
) -> Report:
    """Start the reboot into the staged command line; return the report of the run.

    Raises `Unprocessable` or `HostError` if the reboot is refused; the report then has the reason.
    """
    try:
        tasks = tasks_of(host)
        if tasks:
            raise Unprocessable(
                f"no reboot while tasks run ({', '.join(tasks[:3])})",
                hint="drain the machine first; the profile stays staged",
            )
        config = read_config(host)
        boot, wanted = observation.boot, observation.wanted
        method = choose_method(host, config, boot, wanted, record.reboots)
        method = prepare(host, method, boot, wanted)
        boot_id, now = host.hardware.boot_id, host.now()
        attempt = Attempt(boot_id=boot_id, purpose=purpose, way=method.name, at=now)
        state.save(replace(record, attempt=attempt, reboots=with_this_boot(host, record.reboots)))
        report = replace(report, detail=f"rebooting by {method.name}")
        state.write_status(report)
        host.log.info("reboot", extra={"way": method.name, "purpose": attempt.purpose})
        start(host, method, boot, wanted)
    except (Unprocessable, HostError) as e:
        state.write_status(replace(report, detail=str(e)))
        raise
    return report


def choose_method(
    host: Host, config: RebootConfig, boot: BootLine, wanted: WantedBoot, reboots: RecordedReboots
) -> RebootMethod:
    """Return how to reboot into the wanted line.

    Raises `Unprocessable` if the host would boot its old line, or was rebooted too often.
    """
    if len(recent(host, reboots)) >= MAX_REBOOTS:
        raise Unprocessable(
            f"no reboot: the host was rebooted {MAX_REBOOTS} times within "
            f"{WINDOW_S / 60:.0f} minutes for its profile",
            hint="`sidekick status` shows the purpose of each; reboot by hand if necessary",
        )
    kernel, initrd, reason = _kexec_files(host, config, wanted)
    reason = reason or boot.why_no_kexec_line(wanted)
    ours = any(group != GUARD for group in wanted.groups) and wanted.entry is not None
    why_no_boot_once = boot.loader.why_no_boot_once(host) if ours else ""
    if not reason:
        return RebootMethod("kexec", kernel, initrd, once=ours and not why_no_boot_once)
    if not why_no_boot_once:
        return RebootMethod("reboot", once=ours)
    raise Unprocessable(
        f"no reboot: it would restore the old command line ({why_no_boot_once}), and kexec is not "
        f"possible ({reason})",
        hint=f"name a kernel in {CONFIG} (kexec_kernel, kexec_initrd), or change the line in "
        "the boot loader and reboot by hand",
    )


def prepare(host: Host, method: RebootMethod, boot: BootLine, wanted: WantedBoot) -> RebootMethod:
    """Load the kernel for kexec, or select sidekick's entry for the next boot; return the method.

    If the kernel refuses kexec, the boot loader is the method. Raises `HostError` if there is none.
    """
    if method.name == "kexec":
        load = ["kexec", "-l", method.kernel, f"--command-line={boot.kexec_line(wanted)}"]
        if method.initrd:
            load.append(f"--initrd={method.initrd}")
        try:
            host.processes.run(load, timeout_s=120.0)
            return method
        except ProgramError as e:
            return _without_kexec(host, method, boot, wanted, e)
    if method.once:
        boot.loader.boot_once(host)
    return method


def start(host: Host, method: RebootMethod, boot: BootLine, wanted: WantedBoot) -> None:
    """Start the prepared reboot; returns while the host goes down. Raises `HostError`."""
    if method.name == "kexec":
        try:
            host.processes.run(["systemctl", "kexec"])
            return
        except ProgramError as e:
            _without_kexec(host, method, boot, wanted, e)
    host.processes.run(["systemctl", "reboot"])


def _without_kexec(
    host: Host, method: RebootMethod, boot: BootLine, wanted: WantedBoot, error: ProgramError
) -> RebootMethod:
    """Return the method through the boot loader, prepared; raise `error` if it would not help."""
    if wanted.entry is not None and not method.once:
        error.hint = "the kernel may refuse kexec (Secure Boot); no boot loader has the line"
        raise error
    return prepare(host, RebootMethod("reboot", once=method.once), boot, wanted)


def _kexec_files(host: Host, config: RebootConfig, wanted: WantedBoot) -> tuple[str, str, str]:
    """Return kernel and initial RAM disk to load, and why kexec is impossible ("" if it is not)."""
    version = next(iter(wanted.groups.get(VERSION, ())), host.hardware.kernel)
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
