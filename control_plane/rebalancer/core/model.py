"""The solver's input and answer: plain values, because both are sent between two processes.

Each machine has *room* (what claims may still take, in the allocator's exact integers) and *sizes*
(with which its load is compared). A task has a *kind* (what it claims) and a *load* in each
dimension, which is measured or else equals its claim. A machine belongs to one entitlement, and
tasks never leave their entitlement.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from control_plane.api.rebalancing import GoalChange, MoveView, StackView, SwapView

DIMENSIONS = ("cpu", "memory", "network")
"""Dimensions of loads and sizes, in RRU, bytes and Mbit/s."""
ROOM = ("memory", "gpus", "network", "disk", "ports")
"""Order of claims and rooms besides CPU; GPUs in millionths."""


class TaskKind(msgspec.Struct, frozen=True, array_like=True):
    """What each task of a kind claims."""

    micro_rru: int
    micro_cpus: int
    needs: tuple[int, int, int, int, int]
    """In the order of `ROOM`."""
    admission: int
    """Index in `RegionModel.admissions` of the machines where they may run."""


class BinRule(msgspec.Struct, frozen=True, array_like=True):
    """How the tasks of a job must be spread over the bins of a property."""

    property: int
    """Index in `RegionModel.bins`; -1: each machine is a bin."""
    even: bool
    """A move to another bin must not make it less even; False: tasks stay in their bin."""
    at_most: int = 0
    """Tasks of the job in one bin; 0: any number."""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of goals and the prices of moves, in one unit.

    The unit is one machine whose use exceeds its limit by 100 % of its size in one dimension.
    """

    balance: float = 1.0
    """Per machine and dimension: use above the entitlement's average plus `tolerance`."""
    hot: float = 10.0
    """Per machine and dimension: use above `hot_from`, in addition to `balance`."""
    tolerance: float = 0.1
    power: float = 10.0
    """Per place with a power budget: power above it, in machines at full load there."""
    hot_from: float = 0.8
    """Share of use above which a machine is hot: queues at a resource grow steeply above it."""
    move: float = 0.02
    """Price of any move, because a task restarts. A move must gain more than its price."""
    move_per_gib: float = 0.002
    """Additional price of a move per GiB of memory, which must be warmed up again."""
    open: float = 0.05
    """Price of a free machine that the entitlement takes for the plan."""
    swap: float = 0.3
    """Price of an exchange of two machines: all of their tasks restart."""
    fragment: float = 0.5
    """Per machine class that an entitlement has: one more class that its tasks must fit."""


class TaskColumns(msgspec.Struct, frozen=True, kw_only=True):
    """All tasks, in columns of packed numbers (`packed`): there may be a million."""

    job: bytes = b""
    """Index in `RegionModel.jobs`; `INT`, as are the next three."""
    index: bytes = b""
    """Index of the task in its job."""
    kind: bytes = b""
    machine: bytes = b""
    load: bytes = b""
    """`FLOAT`; for each task one number per dimension."""
    price: bytes = b""
    """`FLOAT`: what a move of the task costs in addition to `Weights.move`."""
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
    """A region as the solver reads it; most fields are lists by machine, task or job."""

    weights: Weights = Weights()
    pools: list[str] = []
    machines: list[str] = []
    pool_of: list[int] = []
    """By machine. A free machine that a pool may take counts as the pool's."""
    is_free: list[bool] = []
    is_open: list[bool] = []
    """Whether the machine takes tasks now."""
    sizes: list[tuple[float, float, float]] = []
    """In the order of `DIMENSIONS`; 0: unknown, so this load costs nothing."""
    cpu_grains: list[tuple[int, int]] = []
    """Grains of a millionth of an RRU, and of a millionth of a core (`Capacity`)."""
    room_cpu: list[int] = []
    """Free CPU, in grains."""
    room: list[tuple[int, int, int, int, int]] = []
    """Free room, in the order of `ROOM`."""
    places: list[PoweredPlace] = []
    """Places with a power budget."""
    places_of: list[list[int]] = []
    """By level (data center, MSB, row, rack), by machine: which of `places`; -1: none."""
    watts_per_rru: list[float] = []
    """By machine: power that each used RRU adds; empty without `places`."""
    machine_class: list[int] = []
    """By machine; machines of one class offer nearly the same. Empty: nothing is exchanged."""
    swappable: bytes = b""
    """One byte per machine: 1 where its entitlement may exchange it."""
    stack_class: list[int] = []
    """By pool: small pools of one class may share machines; -1: a large pool. Empty: none may."""
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
    """The limits of the solver's search."""

    seconds: float = 20.0
    steps: int = 0
    """The most attempts to improve a machine; 0: no limit. For runs that must repeat exactly."""
    moves: int = 1_000
    """The most moves of a plan; the hottest machines come first."""
    seed: int = 1
    with_bound: bool = True
    swaps: int = 0
    """The most exchanges of machines between entitlements."""


class SolverAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A plan with its gain and price; its moves and exchanges have no ids and dates yet."""

    moves: list[MoveView] = []
    swaps: list[SwapView] = []
    stacks: list[StackView] = []
    scores: list[GoalChange] = []
    price: float = 0.0
    hot_before: int = 0
    """Machines above `Weights.hot_from` in some dimension."""
    hot_after: int = 0
    limits: dict[str, list[float]] = {}
    """By pool: the use of each dimension above which a machine costs."""
    watts: list[tuple[float, float]] = []
    """By place of the model: power draw before and after."""
    used: tuple[bytes, bytes] = (b"", b"")
    """`FLOAT`; use of each machine before and after, one number per dimension."""
    bound: float | None = None
    """No plan brings the sum of the goals below this; None: not computed."""
    took_s: float = 0.0
    searched: int = 0
    """Attempts to improve a machine."""
    is_complete: bool = False
    """The search found no further improvement; False: it reached its limit of time or steps."""

    @property
    def gain(self) -> float:
        """Return by how much the plan reduces the sum of the goals."""
        return sum(score.before - score.after for score in self.scores)
