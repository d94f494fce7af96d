"""Releases of packages on hosts: which release each host should run, and which host is next.

A fleet has a push like a job, so a pipeline takes it through the same stages. Hosts are changed
one at a time, each when the previous one is healthy with its release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from control_plane.api.intents import PushIntent
from conveyor.core.acts import DeliveryAct, GiveBack, PushBack, PushStage, SetFrozen
from conveyor.core.stages import push_of
from conveyor.runs import JobProgress
from wire.errors import Conflict

RETRY_S = 60.0
"""Interval between two attempts to restore the earlier release on a host."""


class HostChange(msgspec.Struct, frozen=True, kw_only=True):
    """The host that is being changed."""

    host: str
    release: str
    since: float
    """When the change was decided, in seconds since 1970."""
    installed: float | None = None
    """When its command ended; None: it runs, or has to be run again after a crash."""
    healthy_since: float | None = None
    boot: str = ""
    """Boot of the conveyor's host whose clock gave `installed`."""


class FleetRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The wanted state of a fleet, and its progress."""

    schema: int = 1
    release: str = ""
    """Wanted on `share` or `tasks` of the hosts; empty: nothing was wanted yet."""
    stable: str = ""
    """Wanted on the others."""
    share: float = 1.0
    tasks: int | None = None
    version: int = 0
    """Rises with each write."""
    reason: str = ""
    is_owned: bool = False
    is_frozen: bool = False
    is_returning: bool = False
    """Whether the fleet returns to its earlier release: failed hosts are then tried again."""
    put: dict[str, str] = {}
    """Host → the release whose installation last began; of hosts that are in the region."""
    work: HostChange | None = None
    failed: dict[str, str] = {}
    """Host → why it is not healthy with its release."""
    failed_at: float = 0.0

    @property
    def part(self) -> PushIntent:
        """Return the part of the hosts on which the release is wanted."""
        return PushIntent(version=self.version, share=self.share, tasks=self.tasks)


@dataclass(frozen=True, slots=True)
class ObservedHost:
    """One host as it was last observed."""

    name: str
    release: str
    """Its release, as it reports it; empty: unknown."""
    is_healthy: bool
    why: str = ""
    """Why it is not healthy."""


@dataclass(frozen=True, slots=True)
class FleetTimeouts:
    """How long a host may take, and how long it must stay healthy."""

    healthy_s: float
    """From the end of its command until it is healthy."""
    settle_s: float
    """It must be healthy for this long before the next one begins."""


def apply_act(record: FleetRecord, act: DeliveryAct, common: str) -> FleetRecord:
    """Return the record after an act of a pipeline; `common` is the release that most hosts run.

    Raises `Conflict` if the act was decided on another version.
    """
    if isinstance(act, SetFrozen):
        return replace(record, is_frozen=act.frozen)
    if act.expect != record.version:
        raise Conflict(
            f"cannot change fleet {act.job}: it is at version {record.version}, not {act.expect}"
        )
    after = replace(record, version=record.version + 1, reason=act.reason)
    match act:
        case GiveBack():
            return replace(after, is_owned=False, is_returning=False)
        case PushStage():
            part = push_of(act.stage)
            if act.image != record.release:
                after = replace(after, stable=record.release or common, failed={})
            return replace(
                after,
                release=act.image,
                share=part.share,
                tasks=part.tasks,
                is_owned=True,
                is_returning=False,
            )
        case PushBack():
            return replace(
                after,
                release=act.image,
                stable=act.image,
                share=1.0,
                tasks=None,
                is_owned=True,
                is_returning=True,
                failed={},
            )


def common_release(hosts: Sequence[ObservedHost]) -> str:
    """Return the release that most hosts run; of two equally common ones the greater."""
    known = Counter(host.release for host in hosts if host.release)
    return max(known, key=lambda release: (known[release], release), default="")


def wanted_releases(record: FleetRecord, hosts: Sequence[ObservedHost]) -> dict[str, str]:
    """Return host → the release that it should run; hosts that have the new one keep it.

    `hosts` are in the order in which they are changed: the first is the canary.
    """
    if not record.release:
        return {}
    count = record.part.of(len(hosts))
    names = [host.name for host in hosts]
    is_new = {h.name: record.put.get(h.name, h.release) == record.release for h in hosts}
    chosen = set(sorted(names, key=lambda name: not is_new[name])[:count])  # a stable sort
    return {name: record.release if name in chosen else record.stable for name in names}


def advance(
    record: FleetRecord, hosts: Sequence[ObservedHost], timeouts: FleetTimeouts, now: float
) -> FleetRecord:
    """Return the record with the host to change now, which is stored before the host is changed."""
    if record.work is not None:
        return _check_changed_host(record, record.work, hosts, timeouts, now)
    if record.is_frozen:
        return record
    if record.failed:
        if not record.is_returning or 0 <= now - record.failed_at < RETRY_S:
            return record
        record = replace(record, failed={})
    for name in _hosts_to_change(record, hosts):
        release = wanted_releases(record, hosts)[name]
        work = HostChange(host=name, release=release, since=now)
        present = {h.name for h in hosts}  # hosts that left the region are forgotten
        put = {host: was for host, was in record.put.items() if host in present}
        return replace(record, work=work, put=put | {name: release})
    return record


def _hosts_to_change(record: FleetRecord, hosts: Sequence[ObservedHost]) -> list[str]:
    """Return the hosts that should run another release; those that return to the old one first.

    An unavailable host is skipped, unless an installation by this fleet may be the reason.
    """
    wanted = wanted_releases(record, hosts)
    to_change = [
        h.name
        for h in hosts
        if not _has_release(record, h, wanted.get(h.name, ""))
        and (h.is_healthy or h.name in record.put)
    ]
    return sorted(to_change, key=lambda name: wanted[name] == record.release != record.stable)


def _has_release(record: FleetRecord, host: ObservedHost, wanted: str) -> bool:
    """Return whether a host runs a release: it reports it, and no other was installed since."""
    return not wanted or (host.release == wanted == record.put.get(host.name, wanted))


def _check_changed_host(
    record: FleetRecord,
    work: HostChange,
    hosts: Sequence[ObservedHost],
    timeouts: FleetTimeouts,
    now: float,
) -> FleetRecord:
    """Return the record after an observation of the host that is being changed."""
    if work.installed is None:
        return record
    seen = next((host for host in hosts if host.name == work.host), None)
    if seen is None:
        return replace(record, work=None)  # the host left the region
    if seen.is_healthy and seen.release == work.release:
        since = now if work.healthy_since is None else work.healthy_since
        if now - since >= timeouts.settle_s:
            return replace(record, work=None)
        return replace(record, work=replace(work, healthy_since=since))
    if now - work.installed < timeouts.healthy_s:
        return replace(record, work=replace(work, healthy_since=None))
    is_other = seen.is_healthy and seen.release
    why = f"it runs {seen.release}" if is_other else seen.why or "it does not answer"
    return after_failure(
        record, f"not healthy with {work.release} within {timeouts.healthy_s:g} s: {why}", now
    )


def after_install(record: FleetRecord, now: float, boot: str) -> FleetRecord:
    """Return the record after the command of the host that is being changed succeeded."""
    assert record.work is not None
    return replace(record, work=replace(record.work, installed=now, boot=boot))


def continued_on(record: FleetRecord, now: float, boot: str) -> FleetRecord:
    """Return the record as a process continues it; `boot` is that of its host, empty: not known.

    The clocks of two hosts may differ by minutes. So if a process on another boot ran the command
    of a host, the timeouts of this host begin again now.
    """
    work = record.work
    if not boot or work is None or work.installed is None or work.boot == boot:
        return record
    return after_install(replace(record, work=replace(work, healthy_since=None)), now, boot)


def after_failure(record: FleetRecord, why: str, now: float) -> FleetRecord:
    """Return the record after the change of a host failed."""
    assert record.work is not None
    failed = record.failed | {record.work.host: why}
    return replace(record, work=None, failed=failed, failed_at=now)


def fleet_progress(
    target: str, record: FleetRecord, hosts: Sequence[ObservedHost], release: str, spare: int
) -> JobProgress:
    """Return the progress of a fleet with a release, in the form of a job's progress.

    `spare` is the number of hosts that may be unavailable in a settled fleet.
    """
    wanted, changing = wanted_releases(record, hosts), {*record.failed}
    if record.work is not None:
        changing.add(record.work.host)
    new = {h.name: h for h in hosts if record.put.get(h.name, h.release) == release}
    healthy = [h for h in hosts if h.is_healthy and h.name not in changing]
    updated = {h.name for h in healthy if _has_release(record, h, wanted.get(h.name, ""))}
    updating = record.work is not None or any(
        h.is_healthy and not _has_release(record, h, wanted.get(h.name, "")) for h in hosts
    )
    broken = [f"host {name}: {why}" for name, why in record.failed.items()]
    return JobProgress(
        job=target,
        image=record.release or common_release(hosts),
        size=len(hosts),
        new=len(new),
        new_healthy=sum(1 for h in new.values() if h.name in updated and h.release == release),
        new_unhealthy=len(new.keys() & record.failed),
        healthy=len(healthy),
        updating=updating,
        settled=not updating and not broken and len(hosts) - len(updated) <= spare,
        halted="; ".join(broken) if not record.is_returning else "",
        frozen=record.is_frozen,
        push=record.part,
        push_version=record.version,
        push_reason=record.reason,
        owner="conveyor" if record.is_owned else "",
        new_tasks=tuple(new),
        stable_tasks=tuple(h.name for h in hosts if h.name not in new),
    )
