"""Runs a command inside a system container (a task with its own init).

`python -m agent.machine.enter`:

    enter CGROUP NAME [VARIABLE=VALUE …] -- COMMAND …

This program runs on the host. It moves the command into a cgroup NAME below the task's cgroup,
before the command enters the container. There the command is root. When this program ends, all
processes of the command are killed. Sources: setns(2), user_namespaces(7), cgroups(7), signal(7).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TOP = Path("/sys/fs/cgroup")
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWPID = 0x20000000
NAMESPACES = 0x10000000 | 0x00020000 | 0x04000000 | 0x08000000 | 0x40000000 | 0x02000000
"""CLONE_NEW{USER,NS,UTS,IPC,NET,CGROUP} (include/uapi/linux/sched.h). Only children enter the
namespace of `_CLONE_NEWPID`."""
_PR_CAPBSET_DROP = 24
"""PR_CAPBSET_DROP (prctl(2)): a dropped capability can never be regained."""
GRACE_S = 1.0
"""From SIGTERM until all processes are killed; systemd waits for twice as long."""
NOT_FOUND, NOT_ENTERED = 127, 126
"""Exit codes of shells for a command that is missing, or cannot be run."""
_RECEIVED_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGWINCH,
)
_SI_USER = 0
"""Signals from processes have a code up to this one; signals of a terminal come from the kernel."""


def is_leader(status: str) -> bool:
    """Return whether a process is the init of a PID namespace (proc(5), NSpid)."""
    for line in status.splitlines():
        word, _, rest = line.partition(":")
        numbers = rest.split()
        if word == "NSpid":
            return len(numbers) == 2 and numbers[1] == "1"
    return False


def rights_of(status: str) -> int:
    """Return the capability bounding set of a process as bits."""
    words = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(words["CapBnd"], 16)


def find_leader(group: Path) -> int:
    """Return the pid of the container's init in a task's cgroup, 0 if none runs."""
    for place in ("payload/init.scope", "payload"):
        try:
            pids = (group / place / "cgroup.procs").read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                if is_leader(Path(f"/proc/{pid}/status").read_text()):
                    return int(pid)
            except OSError:
                continue  # it has just ended
    return 0


def run(group: Path, name: str, variables: Sequence[str], command: Sequence[str]) -> int:
    """Run a command to its end; return its exit code, or minus the signal that ended it."""
    leader = find_leader(group)
    machine = os.pidfd_open(leader) if leader else -1
    if not leader or find_leader(group) != leader:  # the pid could have been reused
        sys.stderr.write("the init of the task does not run\n")
        return NOT_ENTERED
    leaf = group / name
    leaf.mkdir(exist_ok=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, _RECEIVED_SIGNALS)
    root = os.open(f"/proc/{leader}/root", os.O_PATH)
    rights = rights_of(Path(f"/proc/{leader}/status").read_text())
    _enter(machine, _CLONE_NEWPID)
    child = os.fork()
    if not child:
        _execute(leaf, (machine, root, rights), variables, command)
    try:
        return os.waitstatus_to_exitcode(_wait_for(child))
    finally:
        _clear(leaf)


def _execute(
    leaf: Path, into: tuple[int, int, int], variables: Sequence[str], command: Sequence[str]
) -> None:
    """Enter the task and execute the command; never returns."""
    code, (machine, root, rights) = NOT_ENTERED, into
    try:
        (leaf / "cgroup.procs").write_text("0")
        _enter(machine, NAMESPACES)
        _drop(rights)
        os.chdir(root)
        os.chroot(".")
        os.chdir("/")
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # changed by Python
            signal.signal(number, signal.SIG_DFL)
        environment = dict(variable.split("=", 1) for variable in variables)
        os.execvpe(command[0], list(command), environment)
    except FileNotFoundError:
        code = NOT_FOUND
        sys.stderr.write(f"{command[0]}: no such program in the task\n")
    except OSError as e:
        sys.stderr.write(f"{command[0]}: {e.strerror}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def _enter(machine: int, namespaces: int) -> None:
    if _LIBC.setns(machine, namespaces):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _drop(rights: int) -> None:
    """Drop every capability that the init of the container cannot have."""
    for number in range(64):
        if not rights >> number & 1 and _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0):
            break  # beyond the kernel's last capability


def _wait_for(child: int) -> int:
    """Forward signals to the command until it ends; return its wait status."""
    kill_at, itself = None, os.pidfd_open(child)
    while True:
        left_s = 3600.0 if kill_at is None else max(0.0, kill_at - time.monotonic())
        info = signal.sigtimedwait(_RECEIVED_SIGNALS, left_s)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if info is None and kill_at is not None:
            signal.pidfd_send_signal(itself, signal.SIGKILL)
        elif info is not None and info.si_signo != signal.SIGCHLD and info.si_code <= _SI_USER:
            signal.pidfd_send_signal(itself, info.si_signo)
            if info.si_signo == signal.SIGTERM and kill_at is None:
                kill_at = time.monotonic() + GRACE_S


def _clear(leaf: Path) -> None:
    """Kill the remaining processes of the command, and remove its cgroup."""
    (leaf / "cgroup.kill").write_text("1")
    for _ in range(100):
        try:
            return leaf.rmdir()
        except FileNotFoundError:
            return None
        except OSError:  # killed processes are still exiting
            time.sleep(0.01)
    return None


def main(argv: Sequence[str]) -> None:
    """Run the command, and exit with its exit code or by its signal."""
    cut = argv.index("--")
    group, name, *variables = argv[:cut]
    code = run(TOP / group.lstrip("/"), name, variables, argv[cut + 1 :])
    if code < 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(sys.argv[1:])
