"""The command runs as a separate process, on network interfaces of a separate namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from recorded import RecordedHost

from sidekick.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[3]

PROFILES = sorted(path.stem for path in (ROOT / "profiles").glob("*.toml"))

DEAR = {
    *("asyncio", "click", "ctypes", "dataclasses", "importlib.metadata", "inspect", "json"),
    *("logging", "shutil", "socket", "subprocess", "typing_extensions"),
}
"""Modules that take milliseconds to import, and that few runs use."""
FOR_PEOPLE = {
    f"sidekick.{name}"
    for name in ("click_commands", "explain", "lint", "manual", "profile_commands", "tuned")
}

RECORDING = """
import os, sys
from sidekick.__main__ import main

end = os._exit
os._exit = lambda code: (print(*sys.modules, file=sys.stderr, flush=True), end(code))
main()
"""
"""Runs the command; at its end it prints the imported modules."""

IN_A_NAMESPACE = """
import sys
from pathlib import Path
from sidekick.context import real_host
from sidekick.profile import Library
from sidekick.report import ApplyOutcome
from sidekick.settings.nic import NicSetting

folder = Path(sys.argv[1])
(folder / "p.toml").write_text(
    "description='p'\\n[nic]\\ninterfaces=['v0']\\ntx_checksum='off'\\ngro='off'\\nlro='on'\\n"
)
setting, host = NicSetting(), real_host(Path("/"))
profile = Library([folder], {"nic": setting}).load("p", {})
wanted = setting.wanted(profile, host)
names = [w.setting for w in wanted]
before = setting.observe(host, names)
able = [w for w in wanted if w.setting != "nic.v0.lro"]
changes = setting.plan(able, before, {})
assert {c.setting for c in changes} >= {"nic.v0.tx_checksum"}, before
for change in changes:
    assert setting.apply(host, change).outcome is ApplyOutcome.APPLIED, change
assert setting.read(host, "nic.v0.tso") == "off", "goes with its checksums"
assert setting.plan(able, setting.observe(host, names), before) == []
for change in reversed(changes):
    setting.undo(host, change)
assert setting.observe(host, names) == before
assert setting.read(host, "nic.nosuch.gro") is None
assert setting.read(host, "nic.v0.rx_ring") is None, "a veth has no rings"
print("ok")
"""


@pytest.mark.parametrize("name", PROFILES)
def test_a_plan_ends_well_as_a_process(tmp_path: Path, name: str) -> None:
    """A wrong free in a library shows only when a process ends (msgspec 0.22)."""
    script = "import sys; from sidekick.cli import main; sys.exit(main())"  # frees what it holds
    argv = [sys.executable, "-c", script, f"--state={tmp_path}", "plan", name]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2, 5), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.root
def test_interfaces_of_the_kernel_are_set_and_given_back(tmp_path: Path) -> None:
    script = (
        "ip link add v0 type veth peer name v1 && ip link set v0 up && ip link set v1 up && "
        'exec "$@"'
    )
    inner = [sys.executable, "-c", IN_A_NAMESPACE, str(tmp_path)]
    argv = ["unshare", "--net", "sh", "-c", script, "sh", *inner]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr


def test_a_run_imports_only_needed_modules(tmp_path: Path) -> None:
    """Agents wait for the run, and the timer starts it on every host, so each import costs time."""
    (tmp_path / "p.toml").write_text(
        "description='p'\n[sysctl]\n'vm.swappiness'=10\n[thp]\nenabled='madvise'\n"
    )
    RecordedHost(tmp_path / "tree", "intel")
    options = [f"--root={tmp_path / 'tree'}", f"--state={tmp_path}", f"--profiles={tmp_path}"]
    for line in (["apply-profile", "p"], ["verify", "--timer"], ["rollback"], ["status"]):
        argv = [sys.executable, "-c", RECORDING, *options, *line]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        imported = set(done.stderr.split())
        assert imported & DEAR == set(), line
        ours = {name for name in imported if name.startswith("sidekick.")}
        assert ours & FOR_PEOPLE == set(), line
        kinds = {x.removeprefix("sidekick.settings.") for x in ours} & set(SETTINGS)
        assert kinds == ({"sysctl", "thp"} if line != ["status"] else set()), line


def test_a_line_that_is_not_plain_is_still_understood(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "sidekick", f"--state={tmp_path}"]
    for line, code in ((["status", "-ojson"], 0), (["status", "--help"], 0), (["wash"], 64)):
        done = subprocess.run([*argv, *line], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == code, (line, done.stderr)
    environment = {
        "_SIDEKICK_COMPLETE": "bash_complete",
        "COMP_WORDS": "sidekick roll",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        argv[:3],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.stdout == "plain,rollback\n"
