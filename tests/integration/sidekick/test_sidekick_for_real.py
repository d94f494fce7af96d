"""The command as a process of its own, and network interfaces of a namespace of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROFILES = sorted(path.stem for path in (ROOT / "profiles").glob("*.toml"))

IN_A_NAMESPACE = """
import sys
from pathlib import Path
from sidekick.cli import real_host
from sidekick.profile import Library
from sidekick.report import Outcome
from sidekick.settings.nic import NicSetting

folder = Path(sys.argv[1])
(folder / "p.toml").write_text(
    "description='p'\\n[nic]\\ninterfaces=['v0']\\ntx_checksum='off'\\ngro='off'\\nlro='on'\\n"
)
setting, host = NicSetting(), real_host(Path("/"))
profile = Library([folder], [setting]).load("p", {})
wanted = setting.wanted(profile, host)
names = [w.setting for w in wanted]
before = setting.observe(host, names)
able = [w for w in wanted if w.setting != "nic.v0.lro"]
changes = setting.plan(able, before, {})
assert {c.setting for c in changes} >= {"nic.v0.tx_checksum"}, before
for change in changes:
    assert setting.apply(host, change).outcome is Outcome.APPLIED, change
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
    """What a library frees wrongly is seen only when a process ends (msgspec 0.22)."""
    argv = [sys.executable, "-m", "sidekick.cli", f"--state={tmp_path}", "plan", name]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2, 5), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_interfaces_of_the_kernel_are_set_and_given_back(tmp_path: Path) -> None:
    script = (
        "ip link add v0 type veth peer name v1 && ip link set v0 up && ip link set v1 up && "
        'exec "$@"'
    )
    inner = [sys.executable, "-c", IN_A_NAMESPACE, str(tmp_path)]
    argv = ["unshare", "--net", "sh", "-c", script, "sh", *inner]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr


def test_what_the_timer_starts_brings_nothing_that_only_people_ask_for(tmp_path: Path) -> None:
    """Every two minutes on every host: what is not imported costs nothing."""
    script = (
        "import sys; from sidekick.cli import main; "
        f"code = main(['--state={tmp_path}', 'verify', '--timer']); "
        "print(code, *sorted({'asyncio', 'sidekick.lint', 'sidekick.tuned', 'sidekick.explain', "
        "'sidekick.profile_commands', 'sidekick.manual'} & set(sys.modules)))"
    )
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["0"], done.stdout + done.stderr
