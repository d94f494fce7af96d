"""The interface of each kind of setting, and its access to the host.

A kind is one class in one module of `settings/` and one line of its registry; no other code
names it (docs/settings.md shows how to write one). `Setting` implements all five verbs for
kinds whose settings are values that are read and written; other kinds override methods.

`merge`, `check`, `wanted`, `plan`, `boot` and `verify` are pure; `observe` reads; `apply` and
`undo` write one change and read it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from sidekick.report import ApplyOutcome, Disruption, SettingChange, SettingReport, WantedSetting
from wire.errors import FieldError, KernelFileError

if TYPE_CHECKING:
    from agent.machine import HostHardware, Processes, ServiceControl
    from agent.machine.kernelfs import KernelFs
    from agent.machine.mounts import Mounts
    from sidekick.disk import Disk
    from sidekick.profile import Profile

Observed = Mapping[str, str | None]
"""The observed value of each setting; None if this host lacks the setting."""

RUNNING = "boot.running"
STAGED = "boot.staged"
"""Names under which `verify` finds the kernel command line of this boot and of the next."""


class Log(Protocol):
    """Where each step is logged: a `logging.Logger`, or `NoLog`."""

    def info(self, sentence: str, /, *, extra: Mapping[str, object]) -> None:
        """Report a change."""

    def warning(self, sentence: str, /, *, extra: Mapping[str, object]) -> None:
        """Report a problem that an operator may have to solve."""


class NoLog:
    """Drops all messages: most runs only write a report."""

    def info(self, sentence: str, /, *, extra: Mapping[str, object]) -> None:
        """Report nothing."""

    def warning(self, sentence: str, /, *, extra: Mapping[str, object]) -> None:
        """Report nothing."""


class Host(msgspec.Struct, frozen=True):
    """Access to the host: the kernel's files, programs, disk, clocks, and the log."""

    fs: KernelFs
    processes: Processes
    disk: Disk
    hardware: HostHardware
    now: Callable[[], float]
    """Seconds since 1970."""
    monotonic: Callable[[], float]
    """Seconds since the boot, suspension included."""
    sleep: Callable[[float], None]
    log: Log = NoLog()
    services: ServiceControl | None = None
    """The service manager; None for the one that belongs to `fs`."""
    mounts: Mounts | None = None
    """Changes mounts; None for the kernel of `fs`."""


class Applied(msgspec.Struct, frozen=True):
    """The result of one change, after reading it back."""

    outcome: ApplyOutcome
    actual: str
    detail: str = ""


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of the kernel command line that a setting needs."""

    settings: tuple[str, ...]
    """The names of the wanted values that it comes from."""
    group: str
    """A key, or several keys that only have a meaning together. The arguments replace those of the
    same group on the host's own line."""
    arguments: tuple[str, ...]
    source: str = ""
    late: bool = False
    """Whether the argument is added only after `apply` returned `pending_reboot`: the running
    kernel could not provide the value. Such an argument may stay on the line after its release,
    because its effect is undone at run time."""


class Setting:
    """One kind of setting."""

    kind: ClassVar[str]
    """Its section of a profile, and the first part of its settings' names."""
    section: ClassVar[Any]
    """The type of that section: a Struct that forbids unknown fields, or a dict."""
    has_dependents: ClassVar[bool] = False
    """Whether other kinds depend on it: it is set before them, and restored after them."""
    adds_settings: ClassVar[bool] = False
    """Whether settings of other kinds may exist only once it is set."""
    interdependent: ClassVar[bool] = False
    """Whether its values limit or change each other. Then sidekick searches for an order of writes
    that the kernel accepts, and repeats writes whose values a later write changed."""

    is_restored_by_boot: ClassVar[bool] = False
    """Whether the next boot restores an original that the kernel refuses now."""

    # the table of a profile

    def merge(self, parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
        """Return the merged table of a profile and its parent, both undecoded."""
        return {**parent, **child}

    def check(self, profile: Profile) -> list[FieldError]:  # noqa: ARG002
        """Return all errors of the section that hold on any host."""
        return []

    def wanted(self, profile: Profile, host: Host) -> list[WantedSetting]:  # noqa: ARG002
        """Return what the profile asks of this host: one value for each key that is given.

        Raises `Unprocessable` if that is more than the host has.
        """
        given = msgspec.structs.asdict(profile.sections[self.kind])
        return [
            self.value_of(profile, key, str(value))
            for key, value in given.items()
            if key != "required" and value is not None
        ]

    def value_of(self, profile: Profile, key: str, value: str, setting: str = "") -> WantedSetting:
        """Return the wanted value of a setting, by default of the one that the key names."""
        return WantedSetting(
            setting=setting or f"{self.kind}.{key}",
            value=value,
            required=profile.sections[self.kind].required,
            source=profile.source_of(f"{self.kind}.{key}"),
        )

    def boot(self, wanted: Sequence[WantedSetting], own: str) -> list[Contribution]:  # noqa: ARG002
        """Return the kernel arguments that these values need; `own` is the host's own line."""
        return []

    # what is known about one name

    def needs(self, setting: str) -> Disruption:  # noqa: ARG002
        """Return what a change of it disrupts."""
        return Disruption.LIVE

    def restarts(self, setting: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return the units to restart, once, after it was written."""
        return ()

    def partners(self, setting: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return settings that change with it: their originals are kept too."""
        return ()

    def side_effects(self, setting: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return settings that the kernel changes with it, for as long as it is in force."""
        return ()

    def claims(self, setting: str) -> tuple[str, ...]:
        """Return the settings whose originals must be kept before it is changed."""
        return (setting, *self.partners(setting), *self.side_effects(setting))

    def touches(self, setting: str) -> tuple[str, ...]:
        """Return the names (such as paths) of what it sets; other kinds use the same names.

        Two settings of a profile that touch one name are a conflict.
        """
        return (setting,)

    def why_missing(self, setting: str) -> str:  # noqa: ARG002
        """Return why a host may not have it, for the report."""
        return "this kernel lacks it"

    def outlives_boot(self, setting: str, booted_with: Sequence[str]) -> bool:  # noqa: ARG002
        """Return whether its original outlives a boot; `booted_with` are our arguments in force.

        Values set at run time do not: a boot restores the host's own value.
        """
        return False

    # the host

    def device(self, host: Host, setting: str) -> str:  # noqa: ARG002
        """Return what distinguishes its device from others of this boot; empty if unknown."""
        return ""

    def read(self, host: Host, setting: str) -> str | None:
        """Return the value in force, None where this host lacks it."""
        raise NotImplementedError

    def write(self, host: Host, setting: str, value: str) -> None:
        """Set a value. Raises `HostError`."""
        raise NotImplementedError

    def same(self, one: str, other: str) -> bool:
        """Return whether two texts mean the same value."""
        return one.split() == other.split()

    def observe(self, host: Host, settings: Iterable[str]) -> dict[str, str | None]:
        """Return the values in force of these settings and of those that they change too."""
        names = dict.fromkeys(s for s in settings if self.owns(s))
        names |= dict.fromkeys(p for name in names for p in self.partners(name))
        return {name: self.read(host, name) for name in names}

    def plan(
        self, wanted: Sequence[WantedSetting], observed: Observed, originals: Observed
    ) -> list[SettingChange]:
        """Return the writes that lead from `observed` to `wanted`, in order.

        Settings that an earlier profile changed and this one does not want return to their
        originals. No other setting is changed.
        """
        ours = {w.setting: w for w in wanted}
        back = [
            WantedSetting(setting=setting, value=original, source="back to the original")
            for setting, original in originals.items()
            if original is not None and setting not in ours
        ]
        return [
            self.change(w, now)
            for w in (*back, *wanted)
            if (now := observed.get(w.setting)) is not None and not self.same(now, w.value)
        ]

    def change(self, wanted: WantedSetting, now: str) -> SettingChange:
        """Return the write that sets one wanted value."""
        return SettingChange(
            setting=wanted.setting,
            before=now,
            after=wanted.value,
            needs=self.needs(wanted.setting),
            why=wanted.source,
            options=wanted.options,
            restarts=self.restarts(wanted.setting),
        )

    def apply(self, host: Host, change: SettingChange) -> Applied:
        """Write one change and read it back. Raises `HostError`."""
        self.write(host, change.setting, change.after)
        actual = self.read(host, change.setting) or ""
        if self.same(actual, change.after):
            return Applied(ApplyOutcome.APPLIED, actual)
        detail = f"wrote {change.after!r}, but the kernel keeps {actual!r}"
        return Applied(ApplyOutcome.FAILED, actual, detail)

    def verify(self, wanted: WantedSetting, observed: Observed) -> SettingReport:
        """Return the outcome of one wanted value."""
        actual = observed.get(wanted.setting)
        if actual is None:
            outcome = ApplyOutcome.UNSUPPORTED if not wanted.required else ApplyOutcome.DRIFTED
        else:
            outcome = (
                ApplyOutcome.APPLIED if self.same(actual, wanted.value) else ApplyOutcome.DRIFTED
            )
        return SettingReport(
            setting=wanted.setting,
            outcome=outcome,
            wanted=wanted.value,
            actual=actual or "-",
            detail=self.why_missing(wanted.setting) if actual is None else "",
        )

    def undo(self, host: Host, change: SettingChange) -> None:
        """Restore the value before one change. Raises `HostError` if it does not read back."""
        if self.same(self.read(host, change.setting) or "", change.before):
            return
        self.write(host, change.setting, change.before)
        self.check_restored(host, change.setting, change.before)

    def check_restored(self, host: Host, setting: str, value: str) -> None:
        """Raise `KernelFileError` unless a setting reads back as the restored value."""
        actual = self.read(host, setting) or ""
        if not self.same(actual, value):
            raise KernelFileError(f"cannot restore {setting} to {value!r}: it reads {actual!r}")

    def cause_of_drift(self, host: Host, report: SettingReport) -> str:  # noqa: ARG002
        """Return which program may have changed what drifted, "" where that is unknown."""
        return ""

    # names

    def owns(self, setting: str) -> bool:
        """Return whether a setting is of this kind."""
        return kind_of(setting) == self.kind


class FileSetting(Setting):
    """A kind each of whose settings is one file of the kernel."""

    def path(self, setting: str) -> str:
        """Return the file of a setting."""
        raise NotImplementedError

    def touches(self, setting: str) -> tuple[str, ...]:
        """Return the file: another kind may set it too."""
        return (self.path(setting),)

    def read(self, host: Host, setting: str) -> str | None:
        """Return the text of the file."""
        return host.fs.find(self.path(setting))

    def write(self, host: Host, setting: str, value: str) -> None:
        """Write the file."""
        host.fs.write(self.path(setting), value)


def kind_of(setting: str) -> str:
    """Return the kind that a setting's name begins with."""
    return setting.partition(".")[0]
