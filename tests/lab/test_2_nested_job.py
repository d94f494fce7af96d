"""Containers inside a job's task, where its entitlement allows them, by commands of the owner."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.images import busybox_image, systemd_image
from tests.lab.lab_client import Failed
from tests.lab.one_machine import OneMachine
from vm_lab.image.programs import build_program

PODMAN = "/usr/bin/podman --root /srv/data/podman --runroot /run/podman"
RUN = f"{PODMAN} run --rm --network=host --uidmap 0:10000:5000 --gidmap 0:10000:5000 inner:1"
SETTINGS = "CONTAINERS_CONF=/opt/inner/containers.conf"
SCRIPT = f"""
set -e
{PODMAN} import --quiet /opt/inner/plain.tar inner:1
exec {RUN} /bin/busybox sh -c \
    'echo container: hello from $((6 * 7)); echo container: users $(busybox cat /proc/self/uid_map)'
"""
UNIT = f"""
[Service]
Type=oneshot
RemainAfterExit=yes
Delegate=yes
Environment={SETTINGS}
ExecStart=/bin/sh /opt/inner/run.sh
"""
"""A service of the system container; it is active once its container has completed."""
CONF = "[containers]\nkeyring = false\ndefault_sysctls = []\n"
WANTED = "./etc/systemd/system/multi-user.target.wants/container.service"
JOB = """
entitlement = "shop"
tasks = 1
image = "{image}"
relaxations = ["own-init", "nested"]
stop_timeout_s = {stop_timeout_s}
[network]
mode = "private"
[limits]
memory_max_bytes = "288MiB"
tasks_max = 256
[volumes.data]
kind = "persistent"
path = "/srv/data"
max_bytes = "64MiB"
[probe]
kind = "exec"
command = ["systemctl", "is-active", "--quiet", "container.service"]
interval_s = 5
timeout_s = 60
start_period_s = 1500
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[OneMachine]:
    found = OneMachine("containers")
    found.up()
    yield found
    found.down()


def image_of(lab: OneMachine, folder: Path) -> str:
    """Return the digest of an image with systemd, podman, and a service that runs a container."""
    file = folder / "systemd.tar"
    file.write_bytes(systemd_image(lab))
    with tarfile.open(file, "a") as image:
        there = {name.removeprefix("./").rstrip("/") for name in image.getnames()}
        with tarfile.open(build_program("podman", print)) as podman:
            for entry in podman:
                if entry.name.removeprefix("./").rstrip("/") not in there:
                    image.addfile(entry, podman.extractfile(entry) if entry.isreg() else None)
        texts = {
            "./opt/inner/containers.conf": CONF.encode(),
            "./opt/inner/run.sh": SCRIPT.encode(),
            "./opt/inner/plain.tar": busybox_image(),
            "./etc/systemd/system/container.service": UNIT.encode(),
        }
        for name, text in texts.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o644
            image.addfile(entry, io.BytesIO(text))
        entry = tarfile.TarInfo(WANTED)
        entry.type, entry.linkname = tarfile.SYMTYPE, "../container.service"
        image.addfile(entry)
    found: str = lab.ctl("image", "push", str(file), timeout_s=900)["digest"]
    return found


def refused(lab: OneMachine, file: Path) -> str:
    """Return the error of applying a job that is not allowed."""
    with pytest.raises(Failed) as ended:
        lab.run("twinectl", "job", "apply", str(file))
    assert ended.value.code != 0
    return ended.value.stderr.strip()


@pytest.mark.behaviour("AG4", "AL6", "F-83")
@pytest.mark.long
def test_a_job_runs_containers_only_if_its_entitlement_allows_it(
    lab: OneMachine, tmp_path: Path
) -> None:
    """The job is refused without a trace, with the command that allows it; then the job runs."""
    image = image_of(lab, tmp_path)
    lab.ctl("entitlement", "create", "shop", "--machines", "1", "--host-profile", "base")
    lab.ctl("entitlement", "update", "shop", "--relaxation", "own-init")
    file = lab.file("web", tmp_path, JOB.format(image=image, stop_timeout_s=300))

    refusal = refused(lab, file)
    assert len(refusal.splitlines()) <= 2, refusal
    assert "relaxations: entitlement 'shop' does not allow nested" in refusal
    command = "twinectl entitlement update shop --relaxation nested --relaxation own-init"
    assert f"a user who may decide requests can run {command}" in refusal
    assert lab.ctl("job", "list")["jobs"] == []
    assert lab.units("m1") == []

    lab.run(*command.split())
    lab.deploy("web", tmp_path, file.read_text().partition("\n")[2])
    logs = ("task", "logs", "web-0")
    hello, users = "container: hello from 42", "container: users 0 10000 5000"
    lab.until("its log", lambda: users in lab.run("twinectl", *logs))
    assert hello in lab.run("twinectl", *logs)
    by_hand = f"systemd-run --quiet --wait --pipe -p Delegate=yes -E {SETTINGS} {RUN}"
    words = f"{by_hand} /bin/busybox echo by hand".split()
    assert lab.run("twinectl", "task", "exec", "web-0", "--", *words).strip() == "by hand"

    spec, unit = lab.job()["record"]["spec"], lab.invocations()
    lab.ctl("entitlement", "update", "shop", "--relaxation", "own-init")
    other = lab.file("web", tmp_path, JOB.format(image=image, stop_timeout_s=301))
    assert "does not allow nested" in refused(lab, other)
    assert lab.job()["record"]["spec"] == spec
    assert lab.invocations() == unit, "what runs stays"

    lab.run("twinectl", "job", "stop", "web")
    lab.until("its unit is gone", lambda: lab.units("m1") == [])
    assert "all is accounted for" in lab.ssh("m1", "twine-agent fsck")
