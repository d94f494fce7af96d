"""HAProxy in front of a job of the lab; `twine-resolver` keeps it in line with discovery."""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from vm_lab.control import LabControlPlane, program
from vm_lab.errors import LabError
from vm_lab.progress import PATIENCE_S
from vm_lab.state import end_process, find_process, process_ref

FIRST_PORT = 8080
_OWN = """\
# The lab's HAProxy: what does not change. Frontends and backends are in twine.cfg.
global
    stats socket {socket} mode 600 level admin expose-fd listeners
defaults
    mode http
    retries 3
    option redispatch 1
    retry-on conn-failure empty-response response-timeout
    timeout connect 4s
    timeout client 60s
    timeout server 8s
frontend metrics
    bind {host}:{metrics_port}
    http-request use-service prometheus-exporter
"""
"""After these timeouts HAProxy sends a request for a machine without power to another task. They
are long, because a guest in software emulation can be slow without a failure."""
METRICS_PORT = 8405
"""The port of HAProxy's metrics of each task, for Prometheus."""


class Proxy:
    """The proxy of one lab: two processes on the host, in the lab's network."""

    def __init__(self, control: LabControlPlane) -> None:
        self._control = control
        self._sandbox = control.sandbox
        folder = control.paths.state / "proxy"
        self._folder = folder
        self._own, self._file = folder / "haproxy.cfg", folder / "twine.cfg"
        self._log = folder / "log"
        self._haproxy, self._resolver = folder / "haproxy.json", folder / "resolver.json"
        self._socket = control.paths.run / "haproxy.sock"

    def start(self, services: Sequence[str]) -> list[str]:
        """Forward to ports of jobs, such as `web:http`; return the URL of each.

        A running proxy is replaced. The jobs must exist.
        """
        host = self._control.topology.host_address
        urls = [f"{host}:{FIRST_PORT + i}" for i in range(len(services))]
        wanted = [f"{s}={url}" for s, url in zip(services, urls, strict=True)]
        haproxy, backends = _haproxy(), self._resolve(wanted)
        self.stop()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        own = _OWN.format(socket=self._socket, host=host, metrics_port=METRICS_PORT)
        self._own.write_text(own)
        self._file.write_text(backends)
        argv: list[str | Path] = [haproxy, "-W", "-f", self._own, "-f", self._file]
        pid = self._sandbox.spawn(argv, self._log)
        self._control.paths.save(self._haproxy, process_ref(pid))
        check = shlex.join([haproxy, "-q", "-c", "-f", str(self._own), "-f", "{file}"])
        keep: list[str | Path] = [*self._resolver_command(wanted), "--file", self._file]
        keep += ["--check", check, "--reload", f"kill -USR2 {pid}"]
        self._control.paths.save(self._resolver, process_ref(self._sandbox.spawn(keep, self._log)))
        self._wait_started()
        return [f"http://{url}/" for url in urls]

    def stop(self) -> None:
        """End the proxy, if one runs."""
        for ref in (self._resolver, self._haproxy):
            end_process(ref)
        self._socket.unlink(missing_ok=True)

    def _resolver_command(self, wanted: Sequence[str]) -> list[str]:
        resolver = str(program("twine-resolver"))
        return [resolver, "--endpoint", self._control.endpoint, "proxy", "haproxy", *wanted]

    def _resolve(self, wanted: Sequence[str]) -> str:
        words = self._resolver_command(wanted)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LabError(f"twine-resolver failed: {done.stderr.strip()}")
        return done.stdout

    def _wait_started(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self._socket.exists():
            if find_process(self._haproxy) is None or time.monotonic() > deadline:
                raise LabError("HAProxy did not start", hint=f"see {self._log}")
            time.sleep(0.05)


def _haproxy() -> str:
    path = shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if path is None:
        raise LabError("there is no haproxy", hint="apt-get install haproxy, or `make setup`")
    return path
