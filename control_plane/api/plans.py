"""What an allocation would do, and why tasks wait: answers to owners, never stored."""

from __future__ import annotations

import msgspec


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task would go."""

    task: int
    machine: str
    datacenter: str
    msb: str
    taken: bool = False
    """The machine would be taken from the free pool."""
    moved_from: str = ""
    """The machine that it has now, if it would leave it."""


class SpreadBin(msgspec.Struct, frozen=True, kw_only=True):
    """How many tasks of a job one MSB holds."""

    datacenter: str
    msb: str
    tasks: int


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of applying a job file, once all of it is done."""

    job: str
    wanted: int
    new_version: bool = False
    """What tasks run changes: all existing tasks restart, within the update's budget."""
    staying: int = 0
    """Tasks that keep their machine."""
    placed: list[PlannedTask] = []
    """Tasks that get one, or another one."""
    stopped: list[int] = []
    """Tasks that are no longer wanted."""
    taken: list[str] = []
    """Machines that the entitlement would take from the free pool."""
    unplaced: list[int] = []
    reasons: list[str] = []
    spread: list[SpreadBin] = []
    """After it."""
    relaxations: list[str] = []
    """What its tasks may do beyond their sandbox."""
    exposure: float = 0.0
    """Of its tasks, by `systemd-analyze security`: from 0 to 10, 10 is worst."""
    exposure_default: float = 0.0
    """The same without relaxations."""


class JobExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job, and everything that keeps its tasks from having a machine."""

    job: str
    wanted: int
    placed: int
    waiting: list[int] = []
    summary: str = ""
    """In one sentence."""
    reasons: list[str] = []
    """All of them, each for a group of machines, a quota or a limit."""
    fitting_held: int = 0
    """Machines of the entitlement that could take one more task now."""
    fitting_free: int = 0
    """Machines of the free pool that could, and that the entitlement may take."""
    spread: list[SpreadBin] = []
    uneven: str = ""
    """Where the job has two tasks more than elsewhere, and why they stay; empty: nowhere."""
    update: str = ""
    """The state of its update, and what a pause or a hold postpones; empty: as it should be."""
    controller: str = ""
    """The state of the connection to the job's controller; empty: it has none."""
    operations: list[str] = []
    """What waits to be done to which task, what it waits for, and since when."""
    volumes: list[str] = []
    """The machines of its tasks' volumes, and what follows from that."""
    image: str = ""
    """Why no task is started from its image, though it has a machine; empty: no problem."""
    second_copies: list[str] = []
    """Tasks that may run twice: also on a machine that does not answer."""
    relaxations: list[str] = []
    exposure: float = 0.0
    exposure_default: float = 0.0
    """These three as in a plan."""
