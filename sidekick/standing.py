"""How the host stands to a profile: the host is looked at, never changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from agent.errors import ConfigError, TwineError
from sidekick.plan import Plan, make_plan
from sidekick.profile import Profile
from sidekick.report import Outcome, ProfileState, Report, SettingReport, Wanted
from sidekick.setting import Host, Setting, kind_of
from sidekick.settings import all_settings, hugepages, kernel
from sidekick.state import Failure, OwnedArgument, Record, StateFolder, Target


def target_of(profile: Profile, host: Host, generation: int = 0, epoch: int = 0) -> Target:
    """Return what a profile asks of this host.

    Raises `ConfigError` with everything that is wrong with it, and `Unprocessable` where it
    asks for more than the host has.
    """
    settings = all_settings(())
    errors = [error for setting in settings for error in setting.check(profile)]
    if errors:
        raise ConfigError(f"profile {profile.name} cannot be used", errors=tuple(errors))
    wanted = [w for setting in settings for w in setting.wanted(profile, host)]
    return Target(name=profile.name, generation=generation, epoch=epoch, wanted=tuple(wanted))


def fresh(host: Host, record: Record) -> Record:
    """Return the record as it holds for this boot.

    A boot brings back what was set at run time, so those originals end with it: what is
    found now is the host's own again, except pages that our command line reserved.
    """
    if record.boot_id == host.hardware.boot_id:
        return record
    running = (host.fs.find("/proc/cmdline") or "").split()
    reserved = any(
        kernel.key_of(o.argument) in kernel.OF_HUGEPAGES and o.argument in running
        for o in record.owned
    )
    originals = {
        setting: value
        for setting, value in record.originals.items()
        if setting == kernel.STAGED or (reserved and kind_of(setting) == "hugepages")
    }
    return replace(record, boot_id=host.hardware.boot_id, originals=originals)


class Look:
    """What is wanted and what is found, at one moment."""

    def __init__(self, host: Host, record: Record, target: Target) -> None:
        """Read everything that the target wants or an earlier profile changed."""
        self.settings: tuple[Setting, ...] = all_settings(record.owned)
        self.wanted = list(target.wanted)
        argument = hugepages.boot_argument(target.wanted)
        if any(o.argument == argument for o in record.owned):
            self.add_argument(argument)
        names = [w.setting for w in self.wanted] + list(record.originals)
        self.observed: dict[str, str | None] = {}
        for setting in self.settings:
            self.observed |= setting.observe(host, names)
        self.plan: Plan = make_plan(self.settings, self.wanted, self.observed, record.originals)
        self._owned = record.owned

    @property
    def names(self) -> set[str]:
        """The settings that are wanted."""
        return {w.setting for w in self.wanted}

    @property
    def kernel_wanted(self) -> list[Wanted]:
        """The command line that is wanted, if any."""
        return [w for w in self.wanted if w.setting == kernel.CMDLINE]

    @property
    def arguments(self) -> list[str]:
        """The arguments of the command line that are wanted."""
        return kernel.arguments_of(self.wanted)

    def setting(self, name: str) -> Setting:
        """Return the kind that a setting is of."""
        return next(s for s in self.settings if s.kind == kind_of(name))

    def add_argument(self, argument: str) -> None:
        """Want one more argument of the command line: pages that the boot must reserve."""
        others = [a for a in self.arguments if kernel.key_of(a) != kernel.key_of(argument)]
        sources = [w.source for w in self.kernel_wanted] + [f"{argument} of [hugepages]"]
        self.wanted = [w for w in self.wanted if w.setting != kernel.CMDLINE]
        self.wanted.append(
            Wanted(
                setting=kernel.CMDLINE,
                value=" ".join([*others, argument]),
                source=", ".join(dict.fromkeys(sources)),
            )
        )

    def own(self, owned: Sequence[OwnedArgument]) -> None:
        """Take these arguments of the command line for ours."""
        self._owned = tuple(owned)
        self.settings = all_settings(owned)

    def verify(self) -> list[SettingReport]:
        """Return how each wanted value stands, and what is left over on the command line.

        Arguments for pages have no report of their own: the number of pages has one.
        """
        wanted = [w for w in self.wanted if w.setting != kernel.CMDLINE]
        arguments = [a for a in self.arguments if kernel.key_of(a) not in kernel.OF_HUGEPAGES]
        running = self.observed.get(kernel.CMDLINE) or ""
        if arguments or kernel.leftovers(running, self._owned, ()):
            wanted.append(Wanted(setting=kernel.CMDLINE, value=" ".join(arguments)))
        return [self.setting(w.setting).verify(w, self.observed) for w in wanted]


def state_of(reports: Iterable[SettingReport], name: str) -> ProfileState:
    """Return the state of a profile whose settings stand so; the worst one decides."""
    outcomes = {report.outcome for report in reports}
    if Outcome.FAILED in outcomes:
        return ProfileState.DEGRADED
    if Outcome.DRIFTED in outcomes:
        return ProfileState.DRIFTED
    if Outcome.PENDING_REBOOT in outcomes:
        return ProfileState.PENDING_REBOOT
    return ProfileState.VERIFIED if name else ProfileState.NONE


def verify(host: Host, state: StateFolder) -> Report:
    """Compare the host with the applied profile, and keep the result for the agent."""
    began = host.monotonic()
    record = state.load()
    target = record.applied or Target()
    reports = Look(host, record, target).verify()
    report = _judged(host, state, record, reports)
    report = replace(report, took_ms=round((host.monotonic() - began) * 1000, 3))
    state.write_status(report)
    return report


def status(host: Host, state: StateFolder) -> Report:
    """Return the last report, corrected by what has happened since."""
    record, last = state.load(), state.read_status()
    unfinished = state.unfinished()
    if unfinished and state.is_locked():
        return replace(
            last or Report(),
            name=unfinished.began.target.name,
            state=ProfileState.APPLYING,
            detail=unfinished.describe(running=True),
        )
    rebooted = bool(record.boot_id) and record.boot_id != host.hardware.boot_id
    if unfinished or rebooted:
        return _judged(host, state, record, last.settings if last else [])
    return last or Report()


def refuse(host: Host, state: StateFolder, target: Target, error: TwineError) -> Report:
    """Report a request that cannot even be begun to whoever reads the status file.

    The host stays as it is; the caller holds the lock.
    """
    failure = Failure(
        name=target.name,
        generation=target.generation,
        epoch=target.epoch,
        reason="; ".join([str(error), *(f"{e.field}: {e.reason}" for e in error.errors)]),
        rolled_back=False,
    )
    record = replace(state.load(), failure=failure)
    state.save(record)
    last = state.read_status()
    report = replace(_judged(host, state, record, last.settings if last else []), command="apply")
    state.write_status(report)
    return report


def _judged(
    host: Host, state: StateFolder, record: Record, reports: Sequence[SettingReport]
) -> Report:
    """Return the report on a host that nothing is being done to."""
    target = record.applied or Target()
    standing, detail = state_of(reports, target.name), ""
    unfinished = state.unfinished()
    if unfinished:
        target, standing = unfinished.began.target, ProfileState.DEGRADED
        detail = unfinished.describe(running=False)
        detail += "; the next apply-profile, resume or rollback finishes or undoes it"
    elif record.failure:
        standing, detail = ProfileState.DEGRADED, record.failure.reason
        failure = record.failure
        target = Target(name=failure.name, generation=failure.generation, epoch=failure.epoch)
    elif record.boot_id and record.boot_id != host.hardware.boot_id:
        detail = "the host was rebooted since and has not resumed its profile"
        if target.name and standing in (ProfileState.VERIFIED, ProfileState.PENDING_REBOOT):
            standing = ProfileState.DRIFTED
    return Report(
        name=target.name,
        generation=target.generation,
        epoch=target.epoch,
        state=standing,
        detail=detail,
        settings=list(reports),
        at=host.now(),
        effective=record.applied.name if record.applied else "",
        command="verify",
        boot_id=host.hardware.boot_id,
    )
