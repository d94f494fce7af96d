"""The lab's control plane, and joining machines to it."""

import http.client
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from vm_lab.cache import partial_file
from vm_lab.errors import LabError
from vm_lab.guests import Guests
from vm_lab.progress import PATIENCE_S
from vm_lab.sandbox import LabSandbox
from vm_lab.state import LabPaths, end_process, find_process, process_ref
from vm_lab.topology import LabMachine, Topology
from wire.quantity_fields import TEXT_ENCODING
from wire.toml_limits import parse_toml


class LabControlPlane:
    """The control plane of one lab: a process on the host, in the lab's network."""

    def __init__(self, sandbox: LabSandbox, topology: Topology) -> None:
        self.sandbox = sandbox
        self.paths = sandbox.paths
        self.topology = topology

    @property
    def url(self) -> str:
        """Return the URL at which machines reach it."""
        return f"https://{self.topology.host_address}:{self.topology.control_plane_port}"

    @property
    def endpoint(self) -> str:
        """Return its endpoint for `twinectl --endpoint`."""
        return f"unix:{self.paths.control_plane_socket}"

    def pid(self) -> int | None:
        """Return its process, or None when it does not run."""
        return find_process(self.paths.control_plane)

    def start(self, config: Path | None = None, timeout_s: float = PATIENCE_S) -> None:
        """Start it unless it runs, and return once it reports that it is ready.

        With `config` it reads a copy of that file. Once it is ready, later starts use the copy,
        too. Raises `LabError` if it runs with another configuration.
        """
        source = config or self.paths.control_plane_config
        text = _text_of(source)
        is_started = self.pid() is None
        given = with_services(text, self.paths)
        used = self.paths.control_plane_started_config
        if not is_started and config is not None and given != _text_of(used):
            raise LabError(
                f"the control plane runs already, and not with {config}",
                hint="end it with `twine-lab control-plane stop` first",
            )
        if is_started:
            self.paths.control_plane_state.mkdir(exist_ok=True, mode=0o700)
            self.paths.control_plane_socket.unlink(missing_ok=True)
            listen = f"{self.topology.host_address}:{self.topology.control_plane_port}"
            argv: list[str | Path] = [
                *(program("twine-control-plane"), "serve"),
                *("--state", self.paths.control_plane_state),
                *("--listen", listen, "--socket", self.paths.control_plane_socket),
            ]
            used.write_text(given)
            argv += ["--config", used]
            pid = self.sandbox.spawn(argv, self.paths.control_plane_log)
            self.paths.save(self.paths.control_plane, process_ref(pid))
        deadline = time.monotonic() + timeout_s
        while not is_ready(self.paths.control_plane_socket):
            if self.pid() is None or time.monotonic() > deadline:
                last = self._last_log_line()
                raise LabError(
                    f"the control plane is not ready after {timeout_s:g} s: {last}",
                    hint=f"see {self.paths.control_plane_log}",
                )
            time.sleep(0.1)
        if is_started and config is not None:
            with partial_file(self.paths.control_plane_config) as partial:
                partial.write_text(text)

    def stop(self) -> None:
        """End it, and return once it is gone."""
        end_process(self.paths.control_plane, patience_s=60)

    def pause(self) -> None:
        """Stop the process, as on a suspended or starved host; `resume` ends that."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the process."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        pid = self.pid()
        if pid is None:
            raise LabError("the control plane does not run", hint="twine-lab control-plane start")
        os.kill(pid, number)

    def twinectl(self, *args: str, within_s: float = PATIENCE_S) -> str:
        """Return the JSON that a twinectl command prints; raise `LabError` after `within_s`."""
        argv = [str(program("twinectl")), "--endpoint", self.endpoint, *args, "-o", "json"]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, check=False, timeout=within_s
            )
        except subprocess.TimeoutExpired as e:
            command = f"twinectl {' '.join(args)}"
            raise LabError(f"`{command}` did not end within {within_s:g} s") from e
        if done.returncode != 0:
            raise LabError(f"`twinectl {' '.join(args)}` failed: {done.stderr.strip()}")
        return done.stdout

    def machine_states(self, within_s: float = PATIENCE_S) -> dict[str, str]:
        """Return the state of each machine, as the control plane reports it."""
        return machine_states(self.twinectl("machine", "list", within_s=within_s))

    def ready_machines(self) -> set[str]:
        """Return the names of the machines whose state is `ready`."""
        return {name for name, state in self.machine_states().items() if state == "ready"}

    def join(self, machine: LabMachine, guests: Guests) -> None:
        """Make the machine a member and start its agent."""
        made = self.twinectl("token", "create", "--host", machine.name)
        token = msgspec.json.decode(made, type=_LabToken)
        words = [
            *("twine-agent", "join", self.url),
            *("--token", token.token, "--ca-hash", token.ca_hash),
            *("--region", self.topology.region, "--datacenter", machine.datacenter),
            *("--msb", machine.msb, "--row", machine.row, "--rack", machine.rack),
            *("--machine-type", machine.type),
            *("--address", f"{machine.address}:{self.topology.agent_port}"),
        ]
        guests.run(machine, f"{shlex.join(words)} && systemctl enable --now --no-block twine-agent")

    def save(self, into: Path) -> None:
        """Copy its state; it must not be running."""
        shutil.rmtree(into, ignore_errors=True)
        shutil.copytree(self.paths.control_plane_state, into)

    def load(self, source: Path) -> None:
        """Replace its state by a copy made with `save`; it must not be running."""
        shutil.rmtree(self.paths.control_plane_state, ignore_errors=True)
        shutil.copytree(source, self.paths.control_plane_state)

    def _last_log_line(self) -> str:
        try:
            lines = self.paths.control_plane_log.read_text(errors="replace").strip().splitlines()
        except FileNotFoundError:
            lines = []
        return lines[-1] if lines else "its log is empty"


def _text_of(file: Path) -> str:
    """Return the text of a configuration, empty if there is no such file."""
    try:
        return file.read_text(TEXT_ENCODING)
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as e:
        raise LabError(f"cannot use {file}: it is not UTF-8 ({e.reason})") from e


def with_services(config: str, paths: LabPaths) -> str:
    """Return a configuration whose console reads the services of this lab, not those of the host.

    Keys of the configuration stay. Text that is not TOML stays as it is, for the control plane's
    error.
    """
    try:
        given = parse_toml(config)
    except (ValueError, RecursionError):
        return config
    sockets = {"autoscaler": str(paths.autoscaler), "conveyor": f"unix:{paths.conveyor}"}
    lines = [f'{key} = "{socket}"\n' for key, socket in sockets.items() if key not in given]
    return "".join(lines) + config


def program(name: str) -> Path:
    """Return a program of the environment that this one runs in."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise LabError(f"there is no {path}", hint="install the project in this environment")
    return path


class _LabToken(msgspec.Struct):
    token: str
    ca_hash: str


class _Record(msgspec.Struct):
    machine: str
    state: str


class _Row(msgspec.Struct):
    record: _Record
    ready: bool


class _Listing(msgspec.Struct):
    machines: list[_Row]


def machine_states(listing: str) -> dict[str, str]:
    """Return name → "ready" or the machine's state from `twinectl machine list -o json`."""
    try:
        rows = msgspec.json.decode(listing, type=_Listing).machines
    except msgspec.DecodeError as e:
        raise LabError(f"cannot read what `twinectl machine list` printed: {e}") from e
    return {row.record.machine: "ready" if row.ready else row.record.state for row in rows}


def is_ready(path: Path) -> bool:
    """Return whether GET /readyz on a unix socket answers 200."""

    class UnixConnection(http.client.HTTPConnection):
        def connect(self) -> None:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(5)
            self.sock.connect(str(path))

    connection = UnixConnection("localhost")
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
