"""ssh into the VMs, and pushing the working tree to them."""

import contextlib
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from vm_lab.errors import LabError
from vm_lab.progress import PATIENCE_S
from vm_lab.sandbox import LabSandbox
from vm_lab.topology import LabMachine

T = TypeVar("T")

READ_MARKS = "cat /opt/twine/deps-layer /opt/twine/project-layer 2>/dev/null || true"
# What a running machine has made its own: its membership, and its users.
KEPT = ("./etc/twine", "./etc/passwd", "./etc/group", "./etc/shadow", "./etc/gshadow", "./var")
UNPACK_PROJECT = f"""
set -e
active=$(systemctl is-active twine-agent.service || true)
rm -rf /opt/twine/lib/python3*/site-packages/agent /opt/twine/lib/python3*/site-packages/sidekick \\
    /opt/twine/lib/python3*/site-packages/control_plane \\
    /opt/twine/lib/python3*/site-packages/vm_lab \\
    /opt/twine/lib/python3*/site-packages/twine_cluster-*
if [ -e /etc/twine/agent.toml ]; then
    tar -xf - -C / {" ".join(f"--exclude={path}" for path in KEPT)}
else
    tar -xf - -C /
fi
systemd-sysusers
systemctl daemon-reload
case "$active" in
    active|activating|failed)
        systemctl restart twine-fence.service twine-agent.service
        echo restarted ;;
    *) echo installed ;;
esac
"""


class Guests:
    """ssh access to the VMs of one lab."""

    def __init__(self, sandbox: LabSandbox) -> None:
        self.sandbox = sandbox

    def command(self, machine: LabMachine, command: str | None = None) -> list[str]:
        """Return the ssh command for the machine: a shell, or one command line.

        Connections are shared: a handshake costs most of a second under TCG.
        """
        paths = self.sandbox.paths
        options = {
            "IdentityFile": paths.vagrant_home / "insecure_private_key",
            "IdentitiesOnly": "yes",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
            "ConnectTimeout": "60",
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "30",
            "ControlMaster": "auto",
            "ControlPath": paths.ssh / machine.name,
            "ControlPersist": "900",
        }
        argv = ["ssh", "-F", "/dev/null"]
        for key, value in options.items():
            argv += ["-o", f"{key}={value}"]
        argv.append(f"root@{machine.address}")
        if command is not None:
            argv.append(command)
        return self.sandbox.command(argv)

    def run(
        self,
        machine: LabMachine,
        command: str,
        *,
        stdin: Path | None = None,
        timeout_s: float = PATIENCE_S,
    ) -> str:
        """Return the output of a command in the guest. Raises `LabError` with it on failure."""
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(stdin.open("rb")) if stdin else subprocess.DEVNULL
            try:
                done = subprocess.run(
                    self.command(machine, command),
                    stdin=source,
                    capture_output=True,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired as e:
                raise LabError(
                    f"{machine.name}: a command did not end within {timeout_s:g} s: {command}"
                ) from e
        output = done.stdout.decode(errors="replace")
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace").strip() or output.strip()
            raise LabError(
                f"{machine.name}: command failed with status {done.returncode}: {command.strip()}\n"
                f"{words}"
            )
        return output

    def forget_connection(self, machine: LabMachine) -> None:
        """Close the shared connection after the guest has stopped or was restored."""
        if (self.sandbox.paths.ssh / machine.name).exists():
            argv = self.command(machine)
            argv[-1:-1] = ["-O", "exit"]
            with contextlib.suppress(subprocess.TimeoutExpired):  # its process hangs
                subprocess.run(argv, capture_output=True, check=False, timeout=20)
            (self.sandbox.paths.ssh / machine.name).unlink(missing_ok=True)

    def wait_reachable(self, machine: LabMachine, timeout_s: float) -> None:
        """Return once ssh answers."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(LabError):
                self.run(machine, "true", timeout_s=60)
                return
            if time.monotonic() > deadline:
                raise LabError(
                    f"{machine.name} does not answer ssh within {timeout_s:g} s",
                    hint=f"its console: {self.sandbox.paths.consoles / machine.name}.log",
                )
            time.sleep(0.5)

    def set_clock(self, machine: LabMachine) -> None:
        """Set the guest's clock to the host's; after a restore it shows the snapshot's time."""
        self.run(machine, f"date --set=@{time.time():.3f} >/dev/null")

    def push(self, machine: LabMachine, deps: Path, project: Path) -> str:
        """Install the layers in the running guest; say whether the agent was restarted."""
        installed = self.run(machine, READ_MARKS).split()
        if installed == [deps.name, project.name]:
            return "has this version already"
        if deps.name not in installed:
            command = f"tar -xf - -C / && echo {shlex.quote(deps.name)} >/opt/twine/deps-layer"
            self.run(machine, command, stdin=deps)
        return self.run(machine, UNPACK_PROJECT, stdin=project).strip()


def on_each(machines: Sequence[LabMachine], work: Callable[[LabMachine], T]) -> list[T]:
    """Do the work on every machine at once; return the results in order.

    Raises the first failure after all have ended.
    """
    with ThreadPoolExecutor(max_workers=len(machines) or 1) as pool:
        futures = [pool.submit(work, machine) for machine in machines]
    return [future.result() for future in futures]
