"""The service manager of the machine in memory."""

from __future__ import annotations

import fnmatch
import itertools
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import cast

from msgspec.structs import replace

from agent.machine import Property, UnitListener, UnitState, signal_name
from agent.machine.unit_properties import encode
from wire.errors import Conflict, SystemdError

_CLEAN_SIGNALS = frozenset({"SIGHUP", "SIGINT", "SIGTERM", "SIGPIPE"})
"""Ends that systemd counts as success (systemd.service(5), SuccessExitStatus=)."""
_HARMLESS = frozenset({signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH})
"""Signals that by default do not end a process (signal(7))."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: with an exit code, or by a signal."""

    code: int | None = 0
    signal: str | None = None
    result: str = ""
    """systemd's result if it does not follow from code and signal, such as `oom-kill`."""

    @property
    def verdict(self) -> str:
        """Return systemd's `Result` for it."""
        if self.result:
            return self.result
        if self.signal:
            return "success" if self.signal in _CLEAN_SIGNALS else "signal"
        return "exit-code" if self.code else "success"


Program = Callable[[list[str], Mapping[str, Property]], Ended | Callable[[], Ended] | None]
"""Takes its arguments and the unit's properties. Returns how it ended; None: it runs until it is
stopped. A returned function runs in another thread and returns how the program ended."""


@dataclass(slots=True)
class _Unit:
    state: UnitState
    properties: dict[str, Property]


class FakeSystemd:
    """Units in memory. Listeners are called with every change before the call returns."""

    def __init__(
        self, programs: Mapping[str, Program] | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """`programs` maps path or base name to behaviour; others run until they are stopped."""
        self.programs: dict[str, Program] = dict(programs or {})
        self.ignores_term: set[str] = set()
        """Units whose processes ignore SIGTERM: stopping them ends in `timeout`."""
        self.never_up: set[str] = set()
        """Units that do not start in time: their start ends in `start-timeout`."""
        self.cannot_run: dict[str, Ended] = {}
        """Glob of unit names → how matching units end instead of running their command."""
        self.slow: set[str] = set()
        """Units that are activating until `become_active`."""
        self.unkillable: set[str] = set()
        """Units with a process that hangs in the kernel: when they are stopped they stay loaded,
        inactive, with their cgroup; see `end_unkillable`."""
        self.started: list[str] = []
        """Every unit that was ever started, in order."""
        self.before: Callable[[str, Sequence[str]], None] = lambda _unit, _argv: None
        """Called with each ExecStartPre= command of a unit."""
        self._clock = clock
        self._units: dict[str, _Unit] = {}
        self._slices: dict[str, dict[str, Property]] = {}
        """Properties that were set on slices that did not run."""
        self._listeners: dict[int, UnitListener] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    # The protocol.

    def start_transient(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Start a unit; a program that ends at once has ended when this returns."""
        encode(properties)
        self._check(unit, properties)
        with self._lock:
            if unit in self._units:
                raise Conflict(
                    f"cannot start {unit}: Unit {unit} was already loaded or has a fragment file."
                )
            self._load_slices(str(properties.get("Slice", "system.slice")))
            self._units[unit] = _Unit(self._fresh(unit, properties), dict(properties))
            self.started.append(unit)
        self._notify(unit)
        if not unit.endswith(".slice"):
            self._execute(unit)

    def stop(self, unit: str) -> None:
        """End a unit's processes and forget it."""
        with self._lock:
            inside = [name for name, u in self._units.items() if u.properties.get("Slice") == unit]
        for name in inside:
            self.stop(name)
        state = self.find(unit)
        if state is None or state.active == "failed":
            return
        if state.sub not in ("running", "start"):
            self._forget(unit)
        elif unit in self.ignores_term:
            self._end(unit, Ended(code=None, signal="SIGKILL", result="timeout"))
        else:
            self._end(unit, Ended(code=None, signal="SIGTERM"), stopped=True)

    def kill(self, unit: str, signal: int) -> None:
        """Signal a unit: it ends, unless the signal is harmless or ignored."""
        with self._lock:
            found = self._units.get(unit)
            has_process = found is not None and found.state.main_pid
        if not has_process or signal in _HARMLESS:
            return
        name = signal_name(signal)
        if name != "SIGTERM" or unit not in self.ignores_term:
            self._end(unit, Ended(code=None, signal=name))

    def reset_failed(self, unit: str) -> None:
        """Forget a failed unit."""
        state = self.find(unit)
        if state is not None and state.active == "failed":
            self._forget(unit)

    def set_properties(self, unit: str, properties: Mapping[str, Property]) -> None:
        """Change properties of a unit."""
        encode(properties)
        self._check(unit, properties, change=True)
        with self._lock:
            if unit.endswith(".slice") and unit not in self._units:
                self._slices.setdefault(unit, {}).update(properties)
                return
            if unit not in self._units:
                raise SystemdError(f"cannot change {unit}: Unit {unit} not loaded.")
            self._units[unit].properties.update(properties)

    def find(self, unit: str) -> UnitState | None:
        """Return the state of a unit, for a running service without main process and cgroup."""
        with self._lock:
            found = self._units.get(unit)
            if found is None:
                return None
            if found.state.sub != "running" or not unit.endswith(".service"):
                return found.state
            return replace(found.state, main_pid=0, control_group="")

    def units(self, pattern: str) -> list[UnitState]:
        """Return the units whose name matches a glob."""
        with self._lock:
            return [
                u.state for name, u in self._units.items() if fnmatch.fnmatchcase(name, pattern)
            ]

    def unit_states(self, pattern: str) -> dict[str, tuple[str, str]]:
        """Return active and sub state of the units whose name matches a glob."""
        return {state.unit: (state.active, state.sub) for state in self.units(pattern)}

    def listen(self, listener: UnitListener) -> Callable[[], None]:
        """Call `listener` on changes from now on; returns a function that ends this."""
        number = next(self._numbers)
        self._listeners[number] = listener
        return lambda: self._listeners.pop(number, None) and None

    def version(self) -> int:
        """Return the version whose behaviour this has."""
        return 257

    # Calls of tests and the simulator.

    def properties(self, unit: str) -> dict[str, Property]:
        """Return the properties of a unit, including later changes."""
        with self._lock:
            return dict(self._units[unit].properties)

    def exit(self, unit: str, code: int = 0) -> None:
        """End a running program, as if it exited."""
        self._end(unit, Ended(code=code))

    def oom(self, unit: str) -> None:
        """Kill a running program, as the kernel does when memory is short."""
        self._end(unit, Ended(code=None, signal="SIGKILL", result="oom-kill"))

    def end_unkillable(self, unit: str) -> None:
        """End the processes of a unit in `unkillable`."""
        self.unkillable.discard(unit)
        self._forget(unit)

    def become_active(self, unit: str) -> None:
        """Make a slow unit active."""
        self.slow.discard(unit)
        with self._lock:
            found = self._units[unit]
            found.state = replace(found.state, active="active", sub="running")
        self._notify(unit)

    def lose_bus(self) -> None:
        """Notify listeners as after a restart of the bus: anything may have changed."""
        self._notify("")

    def reboot(self) -> None:
        """Forget every unit without notifying listeners, as in a host reboot."""
        with self._lock:
            self._units.clear()
            self._slices.clear()

    def _check(
        self, unit: str, properties: Mapping[str, Property], *, change: bool = False
    ) -> None:
        verb = "change" if change else "start"
        for name, value in properties.items():
            reason = _refusal(name, value)
            if reason:
                raise SystemdError(f"cannot {verb} {unit} with {name}={value!r}: {reason}")
        if unit.endswith(".service") and not change and not properties.get("ExecStart"):
            raise SystemdError(f"cannot start {unit}: Unit {unit} has a bad unit file setting.")

    def _load_slices(self, name: str) -> None:
        """Activate the slice of a unit and those above it, as systemd does on its own."""
        for part in _slices(name):
            if part not in self._units:
                known = self._slices.get(part, {})
                self._units[part] = _Unit(self._fresh(part, known), dict(known))

    def _fresh(self, unit: str, properties: Mapping[str, Property]) -> UnitState:
        number = next(self._numbers)
        slices = _slices(str(properties.get("Slice", "system.slice")))
        state = UnitState(
            unit=unit,
            active="active",
            sub="active",
            invocation_id=f"{number:032x}",
            description=str(properties.get("Description", unit)),
            control_group="/" + "/".join(_slices(unit)),
        )
        if unit.endswith(".slice"):
            return state
        oneshot = properties.get("Type") == "oneshot" or unit in self.slow
        return replace(
            state,
            active="activating" if oneshot else "active",
            sub="start" if oneshot else "running",
            main_pid=1000 + number,
            started_at=self._clock(),
            control_group="/" + "/".join([*slices, unit]),
        )

    def _execute(self, unit: str) -> None:
        properties = self.properties(unit)
        for argv in cast(Sequence[Sequence[str]], properties.get("ExecCondition", ())):
            program = self.programs.get(PurePosixPath(argv[0]).name)
            ended = program(list(argv), properties) if program else None
            if isinstance(ended, Ended) and ended.code:
                self._forget(unit)  # systemd.service(5): skipped, not failed
                return
        for argv in cast(Sequence[Sequence[str]], properties.get("ExecStartPre", ())):
            self.before(unit, argv)
        if unit in self.never_up:
            self._end(unit, Ended(code=None, signal="SIGTERM", result="start-timeout"))
            return
        for glob, ended in self.cannot_run.items():
            if fnmatch.fnmatchcase(unit, glob):
                self._end(unit, ended)
                return
        commands = properties["ExecStart"]
        assert isinstance(commands, Sequence)
        for argv in commands:
            name = str(argv[0])
            program = self.programs.get(name) or self.programs.get(PurePosixPath(name).name)
            ended = program(list(argv), properties) if program else None
            if ended is None:
                return
            if not isinstance(ended, Ended):
                self._run_in_thread(unit, ended)
                return
            if ended.verdict != "success" or argv is commands[-1]:
                self._end(unit, ended)
                return

    def _run_in_thread(self, unit: str, run: Callable[[], Ended]) -> None:
        def to_the_end() -> None:
            self._end(unit, run())

        threading.Thread(target=to_the_end, name=unit, daemon=True).start()

    def _end(self, unit: str, ended: Ended, *, stopped: bool = False) -> None:
        with self._lock:
            found = self._units.get(unit)
            if found is None or not found.state.main_pid:
                return
            failed = ended.verdict != "success"
            stays = bool(found.properties.get("RemainAfterExit")) and not stopped
            if failed:
                stays = found.properties.get("CollectMode", "inactive") == "inactive"
            active, sub = ("failed", "failed") if failed else ("active", "exited")
            found.state = replace(
                found.state,
                active=active,
                sub=sub,
                result=ended.verdict,
                main_pid=0,
                control_group=found.state.control_group if unit in self.unkillable else "",
                exit_code=ended.code,
                exit_signal=ended.signal,
                exited_at=self._clock(),
            )
        if stays:
            self._notify(unit)
        else:
            self._forget(unit)

    def _forget(self, unit: str) -> None:
        with self._lock:
            found = self._units.get(unit)
            if found is not None and unit in self.unkillable:
                found.state = replace(found.state, active="inactive", sub="dead", main_pid=0)
            else:
                self._units.pop(unit, None)
        self._notify(unit)

    def _notify(self, unit: str) -> None:
        for listener in list(self._listeners.values()):
            listener(unit)


def _slices(name: str) -> list[str]:
    """Return a slice and its parent slices, outermost first (systemd.slice(5))."""
    if not name.endswith(".slice"):
        return [name]
    parts = name.removesuffix(".slice").split("-")
    return ["-".join(parts[: i + 1]) + ".slice" for i in range(len(parts))]


def _refusal(name: str, value: Property) -> str:
    """Return why systemd refuses a value; empty if it accepts it."""
    if name in ("CPUWeight", "IOWeight") and value not in (None, *range(10_001)):
        return f"Value specified in {name} is out of range"
    if name in ("TasksMax", "MemoryMax") and value == 0:
        return f"Value specified in {name} is out of range"
    if name == "RootDirectory" and not str(value).startswith("/"):
        return f"{name}= path is not absolute: {value}"
    texts = [str(text) for text in value] if isinstance(value, list | tuple) else []
    if name == "Environment" and len({text.partition("=")[0] for text in texts}) < len(texts):
        return "Invalid environment block."
    paths = [text.rstrip("/").split("/")[1:] for text in texts if name == "ExecSearchPath"]
    if any({*parts} & {"", ".", ".."} for parts in paths):
        return f"Invalid {name}"
    return ""
