"""Machines change hands, and the lab leaves nothing: last, because they end what came before."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile

from tests.lab.the_lab import BIN, NAME, ROOT, TheLab


def test_the_contracts_hold_on_the_real_service_manager(the_lab: TheLab) -> None:
    """The test bodies that the in-memory machine passes, inside a guest."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in ("tests/__init__.py", "tests/contract"):
            if (ROOT / name).exists():
                tar.add(ROOT / name, arcname=name)
    command = (
        "rm -rf /root/contract && mkdir /root/contract && cd /root/contract && tar xzf - && "
        "TWINE_REAL=btrfs,systemd TWINE_BTRFS_DIR=/var/lib/twine /opt/twine/bin/python -m pytest "
        "-q -p no:cacheprovider "
        + " ".join(f"tests/contract/test_{name}.py" for name in ("btrfs", "systemd", "hardware"))
    )
    done = subprocess.run(
        [str(BIN / "twine-lab"), "ssh", "--name", NAME, "m1", "--", command],
        input=packed.getvalue(),
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        timeout=900,
        check=False,
    )
    print(done.stdout.decode())
    assert done.returncode == 0, done.stdout.decode()[-4000:]


def test_a_machine_that_changes_hands_runs_the_other_profile(
    web: TheLab, images: dict[str, str]
) -> None:  # HP1 HP15 MO10 MO11
    def swappiness(machine: str) -> str:
        return web.ssh(machine, "cat /proc/sys/vm/swappiness").strip()

    as_web = {m: swappiness(m) for m in web.machines}
    web.run("twinectl", "job", "stop", "web", "--wait")
    web.until(
        "all machines are free",
        lambda: all(not m["record"]["entitlement"] for m in web.ctl("machine", "list")["machines"]),
        timeout_s=240,
    )
    web.ctl("entitlement", "create", "data", "--machines", "1", "--host-profile", "cache")
    web.apply(images["v1"], "name=data", "entitlement=data", "tasks=1", name="data")
    held = [
        m["record"]["machine"]
        for m in web.ctl("machine", "list")["machines"]
        if m["record"]["entitlement"] == "data"
    ]
    assert len(held) == 1
    assert swappiness(held[0]) != as_web[held[0]]
    status = json.loads(web.ssh(held[0], "sidekick status -o json"))
    assert (status["name"], status["state"]) == ("cache", "verified")


def test_a_kernel_command_line_is_reached_by_kexec_and_proved_after_it(
    the_lab: TheLab,
) -> None:  # HP2 HP12
    """By hand, on a machine of the free pool: the way without any control plane."""
    free = [
        m["record"]["machine"]
        for m in the_lab.ctl("machine", "list")["machines"]
        if not m["record"]["entitlement"]
    ]
    machine = free[0]
    boot = the_lab.ssh(machine, "cat /proc/sys/kernel/random/boot_id")
    before = the_lab.ssh(machine, "cat /proc/cmdline").split()
    the_lab.ssh(machine, "nohup sidekick apply-profile batch --reboot >/dev/null 2>&1 &")
    the_lab.until(
        "it booted again",
        lambda: the_lab.ssh(machine, "cat /proc/sys/kernel/random/boot_id") != boot,
    )

    def verified() -> bool:
        status = json.loads(the_lab.ssh(machine, "sidekick status -o json || true"))
        return (status["name"], status["state"]) == ("batch", "verified")

    the_lab.until("the profile is verified in the new boot", verified)
    after = the_lab.ssh(machine, "cat /proc/cmdline").split()
    assert "transparent_hugepage=madvise" in set(after) - set(before)
    assert "madvise" in the_lab.ssh(
        machine, "grep -o '\\[.*\\]' /sys/kernel/mm/transparent_hugepage/enabled"
    )
