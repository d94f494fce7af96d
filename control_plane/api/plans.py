"""The effect that an allocation would have, and why tasks wait; never stored."""

from __future__ import annotations

import msgspec


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that a task would get."""

    task: int
    machine: str
    datacenter: str
    msb: str
    taken: bool = False
    """The machine would be taken from the free pool."""
    moved_from: str = ""
    """Its present machine, if it would leave that."""


class SpreadBin(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks of a job one MSB holds."""

    datacenter: str
    msb: str
    tasks: int


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The expected final result of applying a job file."""

    job: str
    wanted: int
    new_version: bool = False
    """The specification of tasks changes: all tasks restart, within the update's budget."""
    staying: int = 0
    """Tasks that keep their machine."""
    placed: list[PlannedTask] = []
    """Tasks that get a machine, or another machine."""
    stopped: list[int] = []
    """Tasks that are no longer wanted."""
    taken: list[str] = []
    """Machines that the entitlement would take from the free pool."""
    unplaced: list[int] = []
    reasons: list[str] = []
    spread: list[SpreadBin] = []
    """Tasks per MSB afterwards."""
    relaxations: list[str] = []
    """Relaxations of its tasks."""
    exposure: float = 0.0
    """Exposure of its tasks by `systemd-analyze security`, from 0 to 10; 10 is worst."""
    exposure_default: float = 0.0
    """The same without relaxations."""


class JobExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job, and every reason why tasks have no machine."""

    job: str
    wanted: int
    placed: int
    waiting: list[int] = []
    summary: str = ""
    """The state in one sentence."""
    reasons: list[str] = []
    """All reasons, each about a group of machines, a quota or a limit."""
    fitting_held: int = 0
    """Machines of the entitlement that could take one more task now."""
    fitting_free: int = 0
    """Machines of the free pool that could, and which the entitlement may take."""
    spread: list[SpreadBin] = []
    uneven: str = ""
    """Where the spread is uneven by two tasks or more, and why it stays; empty: nowhere."""
    update: str = ""
    """The state of its update, and what a pause or a hold postpones; empty: as it should be."""
    controller: str = ""
    """The state of the connection to the job's controller; empty: it has none."""
    operations: list[str] = []
    """Waiting operations: task, what they wait for, and since when."""
    volumes: list[str] = []
    """The machines of its tasks' volumes, and the consequences for placement."""
    image: str = ""
    """Why no task is started from its image, though it has a machine; empty: no problem."""
    second_copies: list[str] = []
    """Tasks that may run twice: also on a machine that does not answer."""
    relaxations: list[str] = []
    exposure: float = 0.0
    exposure_default: float = 0.0
    """These three fields are those of `JobPlan`."""
