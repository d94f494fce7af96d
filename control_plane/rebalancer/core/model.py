"""What the solver is given and what it answers: values only, so that both cross a process's border.

Objects are tasks, containers are machines. Each machine has *room* (what claims may still take,
exact integers of the allocator) and *sizes* (what its load is compared with). A task has a *kind*
(what it claims), and a *load* in each dimension: measured where it was measured, else what it
claims. A machine belongs to one entitlement; tasks never leave theirs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from control_plane.api.rebalancing import GoalChange, MoveView, StackView, SwapView

DIMENSIONS = ("cpu", "memory", "network")
"""Loads and sizes: RRU, bytes, Mbit/s."""
ROOM = ("memory", "gpus", "network", "disk", "ports")
"""Claims and rooms besides CPU, in this order; GPUs in millionths."""


class TaskKind(msgspec.Struct, frozen=True, array_like=True):
    """What tasks claim that are alike."""

    micro_rru: int
    micro_cpus: int
    needs: tuple[int, int, int, int, int]
    """In the order of `ROOM`."""
    admission: int
    """Which of `RegionModel.admissions` says where they may run."""


class BinRule(msgspec.Struct, frozen=True, array_like=True):
    """What a job minds about the bins of a property."""

    property: int
    """Which of `RegionModel.bins`."""
    even: bool
    """A move to another bin must not make it less even; False: tasks stay in their bin."""
    at_most: int = 0
    """Tasks of the job in one bin; 0: any number."""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be gained, and what a move costs, in one unit.

    The unit is one machine that is used by 100 % more than it should be, in one dimension.
    """

    balance: float = 1.0
    """Per machine and dimension: use above the entitlement's average plus `tolerance`."""
    hot: float = 10.0
    """Per machine and dimension: use above `hot_from`, besides."""
    tolerance: float = 0.1
    power: float = 10.0
    """Per place with a power budget: what is drawn above it, in machines at full load there."""
    hot_from: float = 0.8
    """Above this share of a machine it is hot: queues at a resource grow steeply from there on."""
    move: float = 0.02
    """Price of any move: a task restarts. A move has to relieve machines by more than this."""
    move_per_gib: float = 0.002
    """Besides, per GiB of memory to warm up again."""
    open: float = 0.05
    """Price of a free machine that the entitlement takes for the plan."""
    swap: float = 0.3
    """Price of an exchange of two machines: all of their tasks restart."""
    fragment: float = 0.5
    """Per type that an entitlement has machines of: one kind of room more that its tasks fit or
    not."""


class TaskColumns(msgspec.Struct, frozen=True, kw_only=True):
    """All tasks, in columns of packed numbers (`packed`): there may be a million."""

    job: bytes = b""
    """Which of `RegionModel.jobs`; `INT`, as are the next three."""
    index: bytes = b""
    """Its index in the job."""
    kind: bytes = b""
    machine: bytes = b""
    load: bytes = b""
    """`FLOAT`; of each task as many as there are dimensions, in their order."""
    price: bytes = b""
    """`FLOAT`: what a move of it costs besides `Weights.move`."""
    can_move: bytes = b""
    """One byte each."""


INT: Final = "i"
FLOAT: Final = "d"


def packed(code: str, numbers: Iterable[float]) -> bytes:
    """Return numbers as a column."""
    return array(code, numbers).tobytes()


def unpacked(code: str, column: bytes) -> list[Any]:
    """Return the numbers of a column."""
    return array(code, column).tolist()


class PoweredPlace(msgspec.Struct, frozen=True, array_like=True):
    """A data center, MSB, row or rack with a power budget."""

    name: str
    limit_w: float
    base_w: float
    """Power that does not depend on the model's tasks: idle machines and other machines."""
    machine_w: float
    """Power that full load adds to one machine there, on average; the unit of the excess."""


class RegionModel(msgspec.Struct, frozen=True, kw_only=True):
    """A region as the solver sees it; lists by machine, by task and by job."""

    weights: Weights = Weights()
    pools: list[str] = []
    machines: list[str] = []
    pool_of: list[int] = []
    """By machine. A free machine that a pool may take is listed as the pool's."""
    is_free: list[bool] = []
    is_open: list[bool] = []
    """Whether it may get tasks at all now."""
    sizes: list[tuple[float, float, float]] = []
    """In the order of `DIMENSIONS`; 0: unknown, so its load is not looked at."""
    cpu_grains: list[tuple[int, int]] = []
    """Grains of a millionth of an RRU, and of a core (`Capacity`)."""
    room_cpu: list[int] = []
    """Grains that are left."""
    room: list[tuple[int, int, int, int, int]] = []
    """What is left, in the order of `ROOM`."""
    places: list[PoweredPlace] = []
    """Places with a power budget."""
    places_of: list[list[int]] = []
    """By level (data center, MSB, row, rack), by machine: which of `places`; -1: none."""
    watts_per_rru: list[float] = []
    """By machine: what it draws more for each RRU that is used; empty: without `places`."""
    machine_class: list[int] = []
    """By machine; those of one class offer nearly the same. Empty: nothing is exchanged."""
    swappable: bytes = b""
    """One byte per machine: 1 where its entitlement may exchange it."""
    stack_class: list[int] = []
    """By pool: small ones of one class may share machines; -1: a large one. Empty: none may."""
    bins: list[list[int]] = []
    """By property: the bin of each machine."""
    admissions: list[bytes] = []
    """One byte per machine: 1 where tasks with this admission may run."""
    jobs: list[str] = []
    rules: list[list[BinRule]] = []
    """By job."""
    kinds: list[TaskKind] = []
    tasks: TaskColumns = TaskColumns()
    measured: int = 0
    """Tasks whose load was measured."""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How long the solver may look, and for how much."""

    seconds: float = 20.0
    steps: int = 0
    """Attempts to improve a machine; 0: any number. For runs that must repeat exactly."""
    moves: int = 1_000
    """Maximum of a plan; the hottest machines come first."""
    seed: int = 1
    with_bound: bool = True
    swaps: int = 0
    """Exchanges of machines between entitlements, at most."""


class SolverAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and what it is worth; its moves and exchanges have no names and dates yet."""

    steps: list[MoveView] = []
    swaps: list[SwapView] = []
    stacks: list[StackView] = []
    scores: list[GoalChange] = []
    price: float = 0.0
    hot_before: int = 0
    """Machines above `Weights.hot_from` in some dimension."""
    hot_after: int = 0
    limits: dict[str, list[float]] = {}
    """By pool: the use of each dimension above which a machine costs."""
    drawn: list[tuple[float, float]] = []
    """By place of the model: watts before and after."""
    used: tuple[bytes, bytes] = (b"", b"")
    """`FLOAT`; what is used of each machine before and after, as many as there are dimensions."""
    bound: float | None = None
    """No plan whatever brings the sum of the goals below this; None: not computed."""
    took_s: float = 0.0
    searched: int = 0
    """Attempts to improve a machine."""
    is_complete: bool = False
    """The search ended because it found nothing more, not because its time was over."""

    @property
    def gain(self) -> float:
        """Return what the sum of the goals loses by the plan."""
        return sum(score.before - score.after for score in self.scores)
