"""The ReBalancer's plans, moves and history, as shown and as stored."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from control_plane.api.inventory import Text
from control_plane.api.settings import RebalanceMode


class MoveState(StrEnum):
    """How far a move of a plan is."""

    PLANNED = "planned"
    WAITING = "waiting"
    """It is an operation of its job, which waits for budget, controller, image or room."""
    MOVING = "moving"
    DONE = "done"
    WITHDRAWN = "withdrawn"
    """It was no longer needed or possible when it was to begin."""
    FAILED = "failed"
    """The task got another machine, or was not healthy there."""


class GoalChange(msgspec.Struct, frozen=True, kw_only=True):
    """The value of one goal before and after a plan; less is better."""

    goal: str
    before: float
    after: float


class MoveView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One move."""

    id: str
    """`p3.17`: the 17th move of plan 3."""
    job: str
    task: int
    from_machine: str
    to_machine: str
    wave: int = 0
    """It begins when all moves of earlier waves have ended."""
    gain: float = 0.0
    """Reduction of the sum of the goals."""
    power_gain: float = 0.0
    """The part of `gain` that concerns power budgets."""
    price: float = 0.0
    why: str = ""
    state: MoveState = MoveState.PLANNED
    reason: str = ""
    """Why it is in that state."""
    at: float = 0.0
    """Since when it is in that state, in seconds since 1970."""


class SwapState(StrEnum):
    """How far an exchange of machines is."""

    PLANNED = "planned"
    DRAINING = "draining"
    """Both machines have an event: their tasks leave them."""
    HANDING_OVER = "handing-over"
    """Both are empty and free, and are being assigned to the other entitlement."""
    DONE = "done"
    WITHDRAWN = "withdrawn"
    """Both machines stay in, or return to, their entitlements."""
    FAILED = "failed"
    """Both were given back, but the other entitlement could not take one of them."""


class SwapView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Two entitlements exchange one machine each."""

    id: str
    """`s3.1`: the first exchange of plan 3."""
    one: str
    two: str
    pool_one: str = ""
    """The entitlement that has `one` at first and gets `two`."""
    pool_two: str = ""
    gain: float = 0.0
    price: float = 0.0
    why: str = ""
    state: SwapState = SwapState.PLANNED
    reason: str = ""
    began_at: float = 0.0
    at: float = 0.0
    """Since when it is in that state, in seconds since 1970."""


class PlaceUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of one place before a plan and after it, as shares from 0 to 1."""

    level: str
    """`msb` or `row`."""
    place: str
    machines: int
    before: dict[str, float]
    """By dimension: cpu, memory, network."""
    after: dict[str, float]
    hottest_before: float
    """The largest share of one of its machines, in any dimension."""
    hottest_after: float


class PowerUse(msgspec.Struct, frozen=True, kw_only=True):
    """Power draw of one place with a power budget before and after a plan, in watts."""

    place: str
    limit_w: float
    """Draw above this value has a cost: a share of the budget, or less while power is capped."""
    before_w: float
    after_w: float


class StackView(msgspec.Struct, frozen=True, kw_only=True):
    """Small entitlements that could stack as reservations on the machines of one (MO16)."""

    on: str
    entitlements: list[str]
    machines: int
    """Machines that they hold now and that would become free."""


class RebalancePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The moves that are planned or under way, and their gain."""

    number: int
    """0: the plan is only shown."""
    made_at: float
    took_s: float
    goals: list[GoalChange]
    gain: float
    price: float
    bound: float | None
    """No plan brings the sum of the goals below this; None: unknown."""
    hot_before: int
    hot_after: int
    is_complete: bool
    """The search was complete; False: it reached its time limit."""
    machines: int
    tasks: int
    movable: int
    measured: int
    """Tasks whose load was measured; other tasks count with their claims."""
    moves: list[MoveView]
    swaps: list[SwapView] = []
    stacks: list[StackView] = []
    """Only proposals: owners decide which machines their jobs use."""
    oldest_load_s: float | None = None
    """Age of the oldest measurement in use; None: nothing is measured."""
    watts_measured: int = 0
    """Machines whose power was measured; the power of others is modelled by type and use."""
    only: list[str] = []
    """Entitlements that were examined; empty: all."""
    limits: dict[str, list[float]] = {}
    """Entitlement → use of each dimension above which a machine has a cost."""
    used: dict[str, dict[str, float]] = {}
    """Entitlement → dimension → share of its machines in use now: measured where possible."""
    places: list[PlaceUse] = []
    power: list[PowerUse] = []
    resumed_at: float | None = None
    """When a restarted control plane resumed it, in seconds since 1970."""


class RebalanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of the ReBalancer."""

    mode: RebalanceMode
    paused: bool
    paused_by: str = ""
    paused_why: str = ""
    holding: str = ""
    """Why no move begins now; empty: moves may begin."""
    error: str = ""
    """Why the last plan failed; empty: it succeeded."""
    next_plan_s: float | None = None
    """None: no plan is due."""
    plan: RebalancePlan | None = None
    """The last plan that was made on schedule."""
    gap: float | None = None
    """Share of the best possible gain that the last plan does not reach; None: unknown."""
    measured: int = 0
    """Tasks whose load is known from their agents now."""
    swaps: list[SwapView] = []
    """Exchanges of machines that are under way."""
    done: int = 0
    """Number of remembered moves that were done."""
    withdrawn: int = 0
    failed: int = 0


class RebalanceHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Moves that ended, the newest first."""

    moves: list[MoveView]
    swaps: list[SwapView] = []
    """Exchanges of machines that ended, the newest first."""


class MoveExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One move, one exchange of machines, or the whole model, as text."""

    move: MoveView | None = None
    swap: SwapView | None = None
    lines: list[str]
    model: str = ""
    """The whole model in TOML, if it was requested instead of a move."""


class PauseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request to begin no more moves."""

    reason: Text


class RebalanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The stored state of the ReBalancer: one record for all, and one for the moves of each job."""

    schema: int = 1
    paused_by: str = ""
    paused_why: str = ""
    plans: int = 0
    """Number of plans so far; it numbers them."""
    history: list[MoveView] = []
    """Ended moves; the newest is the last."""
    swaps: list[SwapView] = []
    """Exchanges of machines: under way, and the newest that ended."""
    plan: RebalancePlan | None = None
    """The plan in progress, as it was made."""
    moved: dict[int, float] = {}
    """In the record of a job: task → its last move, in seconds since 1970."""
