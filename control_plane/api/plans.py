"""What an allocation would do, and why tasks wait: answers to owners, nothing stored."""

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
    """What applying a job file would lead to, once it is done."""

    job: str
    wanted: int
    new_version: bool = False
    """What tasks run changes: all that exist are restarted, within the update's budget."""
    staying: int = 0
    """Tasks that keep their machine."""
    placed: list[PlannedTask] = []
    """Tasks that get one, or another one."""
    stopped: list[int] = []
    """Tasks that are not wanted any more."""
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
    """How a job stands, and everything that keeps tasks of it from having a machine."""

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
    """How its update goes, or went; empty: as it should."""
    controller: str = ""
    """How the conversation with the job's controller goes; empty: it has none."""
    operations: list[str] = []
    """What waits to be done to which task, for whom, and since when."""
    volumes: list[str] = []
    """Which machine has what tasks keep, that they stay there, and what becomes of it."""
    image: str = ""
    """Why no task is started from its image, though it has a machine; empty: they are."""
    second_copies: list[str] = []
    """Tasks that may run twice: on a machine that cannot be asked, too."""
    relaxations: list[str] = []
    exposure: float = 0.0
    exposure_default: float = 0.0
    """These three as in a plan."""
