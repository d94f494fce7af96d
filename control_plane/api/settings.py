"""The settings of the schedulers and their defaults; a section of the program's configuration."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from agent.api import Name
from agent.api.ranges import END
from control_plane.api.elastic import ElasticSettings

Positive = Annotated[float, Meta(gt=0)]
PlacePath = Annotated[
    str,
    Meta(
        pattern=r"^[^/\s]+(/[^/\s]+){0,3}" + END,
        max_length=255,
        description="a data center, or a path below one: `dc1/msb2/row1/rack3`",
    ),
]

ShardNumber = Annotated[
    str,
    Meta(
        pattern=r"^([1-9]|[1-5][0-9]|6[0-3])" + END,
        description="a shard from 1 to 63; shard 0 has what no other shard has, so it is global",
    ),
]


class PowerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The power budgets of places, and how far they are overcommitted (AL22)."""

    budgets_w: dict[PlacePath, Annotated[int, Meta(ge=1, le=10**9)]] = {}
    """Data center, MSB, row or rack, each as a path from the data center → watts. Other places have
    no budget."""
    overcommit: Annotated[float, Meta(ge=1, le=3)] = 1.25
    """Factor by which the nominal draw of the machines in use may exceed a budget; 1: not at all. A
    whole data center with a mix of jobs never drew more than 72 % of its machines' peaks together
    (Fan, Weber, Barroso, ISCA 2007), which permits 1.39; the default is more careful."""


class RebalanceMode(StrEnum):
    """What the ReBalancer does automatically. A plan can be requested in each mode."""

    OFF = "off"
    RECOMMEND = "recommend"
    """It plans, and shows the moves."""
    APPLY = "apply"
    """It moves tasks."""


class RebalanceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the ReBalancer improves where tasks are (RE1). Times in seconds."""

    mode: RebalanceMode = RebalanceMode.OFF
    """A move restarts a task, so by default nothing moves before an operator has seen a plan."""
    every_s: Positive = 600.0
    """Time between two plans. Loads change over hours, and each move is checked when it begins."""
    solve_s: Positive = 20.0
    """Time for the search, which is a separate process with low priority."""
    memory_mib: Annotated[int, Meta(ge=256)] = 4096
    """Address space of that process: a million tasks take about 800 MiB."""
    rest_s: Positive = 14_400.0
    """A moved task stays on its machine for this long, so that tasks do not oscillate."""
    settle_s: Annotated[float, Meta(ge=0)] = 600.0
    """A task that started less than this ago is not moved: its load is unknown."""
    patience_s: Positive = 600.0
    """A move that did not begin for this long is withdrawn: a budget, an image or a controller
    prevented it."""
    moves_at_once: Annotated[int, Meta(ge=1)] = 5
    """Moves that run at the same time in the region."""
    moves_per_s: Positive = 0.1
    """Moves that may begin per second …"""
    moves_burst: Annotated[int, Meta(ge=1)] = 5
    """… after at most this many at once."""
    moves_per_plan: Annotated[int, Meta(ge=1, le=100_000)] = 500
    """The hottest machines are relieved first; the next plan continues."""
    hot_from: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Use of a machine's CPU, memory or network above which it is hot."""
    tolerance: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Use above the average of its entitlement that justifies no move."""
    move_price: Annotated[float, Meta(gt=0)] = 0.02
    """The least gain of a move: use above those levels, as a share of one machine."""
    measure_s: Positive = 120.0
    """Time between two readings of the use of a machine's tasks. At most 100 agents per second are
    read, so a round of 50,000 machines takes longer."""
    smooth_s: Positive = 600.0
    """Time constant of the average load: after it a new level has 63 % of the weight."""
    power_from: Annotated[float, Meta(gt=0, le=1)] = 0.95
    """Share of a power budget above which the draw costs. Dynamo caps at 99 % and goes down to 95 %
    (Wu et al., ISCA 2016): tasks begin to move before that."""
    gap_alarm: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """Share of the possible gain that three plans in a row may miss before an alarm."""
    swaps_per_plan: Annotated[int, Meta(ge=0, le=100)] = 0
    """Exchanges of machines between entitlements in one plan: all tasks of both machines restart,
    and both switch profiles, so an operator must enable it."""
    swap_patience_s: Positive = 3_600.0
    """An exchange whose machines are not empty after this long is cancelled."""
    free_machines: Annotated[int, Meta(ge=0)] = 20
    """Free machines that one plan may take for hot entitlements, within their quotas."""


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast the control plane reacts, and how much it does at once. Times in seconds."""

    down_after_s: Positive = 10.0
    """A machine that did not answer for this long is down and its tasks move."""
    agent_grace_s: Positive = 600.0
    """A host that refuses connections is alive, and its tasks most likely run. If its agent does
    not answer again within this time, its tasks are started elsewhere, a second time."""
    join_grace_s: Annotated[float, Meta(ge=0)] = 60.0
    """A machine that joined less than this ago is not marked down: its agent is still starting."""
    poll_wait_s: Positive = 3.0
    """How long an agent may hold a request for events. It is below `down_after_s`, because the
    answer also shows that the agent is alive."""
    poll_retry_s: Positive = 1.0
    """Pause after a poll that failed."""
    call_timeout_s: Positive = 10.0
    """Time limit of one call to an agent, except image pulls."""
    brake_share: Annotated[float, Meta(gt=0, le=1)] = 0.4
    """If more than this share of a rack, MSB, data center or region (and more than one machine)
    is silent at once, it or this process may be cut off. Then no task there moves …"""
    domain_grace_s: Positive = 30.0
    """… until its machines were silent for this time, if it is a rack or an MSB. The time is short:
    these lose power, and their tasks must run again …"""
    partition_grace_s: Positive = 300.0
    """… or for this time, if it is a data center or the region, which are more often cut off."""
    brake_window_s: Positive = 60.0
    """Losses this close to each other count as simultaneous."""
    flap_trust_s: Positive = 15.0
    """A machine that was down for the second time is up again once it answered for this time, which
    doubles with each further failure …"""
    flap_trust_max_s: Positive = 600.0
    """… up to this time."""
    flap_forget_s: Positive = 3600.0
    """One failure stops to count each time that this time passes without a new failure."""
    reboot_grace_s: Positive = 300.0
    """A machine that reboots for its profile may be silent for this time."""
    resync_s: Positive = 30.0
    """Every job is checked at this interval even without a change; every tenth check of an idle job
    is a full round."""
    repair_after_s: Annotated[float, Meta(ge=0)] = 60.0
    """Tasks move for an even spread once nothing else happened to their job for this time, so that
    a short failure moves none."""
    retry_s: Positive = 2.0
    """Pause after a command that an agent refused; doubles up to a minute."""
    give_back_after_s: Annotated[float, Meta(ge=0)] = 60.0
    """A machine that is empty and not needed goes back to the free pool after this long."""
    quarantine_s: Positive = 600.0
    """A machine that failed to reach a profile is not assigned for it again within this time."""
    destructive_per_s: Positive = 10.0
    """Stops and restarts that may be sent per second, over all machines …"""
    destructive_burst: Annotated[int, Meta(ge=1)] = 20
    """… after at most this many at once."""
    capped_moves_per_s: Positive = 1.0
    """Tasks that may leave machines whose power is capped, per second, over the region …"""
    capped_moves_burst: Annotated[int, Meta(ge=1)] = 10
    """… after at most this many at once: the machines that take their tasks need power, too."""
    capacity_loss_share: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """If more than this share of a data center's tasks are not healthy, or run on machines with
    capped power, operations that can wait take down no tasks there …"""
    capacity_loss_tasks: Annotated[int, Meta(ge=1)] = 100
    """… provided that this number of tasks is affected."""
    take_away_per_s: Positive = 20.0
    """Machines that may be taken from entitlements per second …"""
    take_away_burst: Annotated[int, Meta(ge=1)] = 200
    """… after at most this many at once."""
    mark_down_per_s: Positive = 5.0
    """Machines that may be declared down per second …"""
    mark_down_burst: Annotated[int, Meta(ge=1)] = 500
    """… after at most this many at once: an MSB of the paper."""
    profile_switches_per_s: Positive = 5.0
    """Machines that may switch to another profile per second …"""
    profile_switches_burst: Annotated[int, Meta(ge=1)] = 200
    """… after at most this many at once."""
    default_cpu_cores: Annotated[float, Meta(ge=0.001, le=4096)] = 0.25
    """The CPU claim of a task whose job does not set one: four such tasks per core."""
    rebalance: RebalanceSettings = RebalanceSettings()
    """How the ReBalancer improves where tasks are."""
    elastic: ElasticSettings = ElasticSettings()
    """How idle machines are lent."""
    shards: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of schedulers with an allocator, each with its own entitlements."""
    shard_regions: dict[ShardNumber, Name] = {}
    """Shard → its region. Such a shard owns only entitlements that are pinned to that region; other
    shards are global. With shards as processes, the core's setting counts."""
    power: PowerSettings = PowerSettings()
    """The power budgets of racks, rows and MSBs."""
    concurrent_calls: Annotated[int, Meta(ge=1)] = 64
    """Calls to agents that may be in flight together."""

    @property
    def poll_patience_s(self) -> float:
        """Return how long a request for events may take: it is cancelled early enough for another
        one before its machine counts as down.
        """
        return self.poll_wait_s + max(1.0, self.down_after_s / 4)


class Approval(StrEnum):
    """Which requests for more capacity are granted without a user's decision."""

    FITS = "fits"
    """Requests that fit on machines which are not promised to others."""
    ALWAYS = "always"
    """None: every one waits in the queue. Giving capacity back is always granted."""


class Raise(StrEnum):
    """What a change can raise in an entitlement; a reduction needs no approver."""

    CAPACITY = "capacity"
    """More machines or RRU, or other ones: types, data center, overcommit, business unit."""
    PRIORITY = "priority"
    """It gets scarce machines before others."""
    RIGHTS = "rights"
    """Its jobs may have more relaxations of the sandbox, or images signed by fewer keys."""


class Overgrant(StrEnum):
    """The outcome of a request that the region's machines cannot satisfy."""

    REFUSE = "refuse"
    ALLOW = "allow"
    """Granted, for regions that never use all quotas at once; the first user gets the machines."""


def owners_settings() -> dict[str, list[str]]:
    """Return the settings of the shipped profiles that owners may change."""
    return {"web": ["sysctl.net.*", "sysctl.vm.swappiness", "hugepages.*"]}


class PortalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules of the capacity portal."""

    approval: Approval = Approval.FITS
    overgrant: Overgrant = Overgrant.REFUSE
    owners_raise: list[Raise] = msgspec.field(default_factory=lambda: [Raise.CAPACITY])
    """What owners may raise in their own entitlements; for capacity `approval` also applies. Every
    other raise waits for an approver. Operators and approvers may raise everything."""
    profile_keys: dict[str, list[Annotated[str, Meta(min_length=1, max_length=200)]]] = (
        msgspec.field(default_factory=owners_settings)
    )
    """Host profile → settings that owners of entitlements that run it may change."""
    approvers: list[Annotated[str, Meta(min_length=1, max_length=63)]] = []
    """Users who decide requests, in addition to the operators at the socket."""
    keep_requests: Annotated[int, Meta(ge=10)] = 10_000
    """Decided requests that are kept for the record."""
