"""Tasks with systemd inside as a job of a control plane: placed, identified, updated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from tests.lab.images import systemd_image
from tests.lab.lab_client import Failed
from tests.lab.one_machine import OneMachine

HERE = "/run/twine-identity"
OFF = "/etc/twine/agent.toml.d/no-own-init.toml"
JOB = """
entitlement = "shop"
tasks = 1
image = "{image}"
identity = true
relaxations = ["own-init"]
stop_timeout_s = 300
[network]
mode = "private"
[limits]
memory_max_bytes = "192MiB"
tasks_max = 128
[environment]
EDITION = "{edition}"
[probe]
kind = "exec"
command = ["systemctl", "is-active", "--quiet", "hello.service"]
interval_s = 5
timeout_s = 60
start_period_s = 900
"""
EDITION = "systemctl show-environment | grep EDITION="
OWNER = f"setpriv --reuid daemon --clear-groups cat {HERE}/identity.pem >/dev/null && echo read"


@pytest.fixture(scope="module")
def lab() -> Iterator[OneMachine]:
    found = OneMachine("machines")
    found.up()
    yield found
    found.down()


def image_of(lab: OneMachine, folder: Path) -> str:
    """Return the digest of an image with systemd, made from the packages of the machine."""
    file = folder / "systemd.tar"
    file.write_bytes(systemd_image(lab))
    found: str = lab.ctl("image", "push", str(file), timeout_s=900)["digest"]
    return found


def switched(lab: OneMachine, *, on: bool) -> None:
    """Allow or forbid such tasks on the host, and wait until the control plane knows."""
    command = f"rm -f {OFF}" if on else f"mkdir -p $(dirname {OFF}); echo own_init = false >{OFF}"
    lab.ssh("m1", f"{command}; systemctl restart twine-agent.service")
    where = ("machine", "list", "--where", "capability.own-init exists")
    lab.until("it is known", lambda: len(lab.ctl(*where)["machines"]) == int(on))
    lab.usable()


@pytest.mark.behaviour("AL6", "AG4", "AG10", "F-83")
@pytest.mark.long
def test_a_job_with_own_init_is_placed_resolved_entered_updated_and_removed(
    lab: OneMachine, tmp_path: Path
) -> None:
    """Only commands of its owner are used, from plan to stop."""
    image = image_of(lab, tmp_path)
    lab.ctl("entitlement", "create", "shop", "--machines", "1", "--host-profile", "base")
    first = JOB.format(image=image, edition="first")
    file = lab.file("web", tmp_path, first)
    with pytest.raises(Failed, match="'shop' does not allow own-init"):
        lab.ctl("job", "plan", str(file))
    lab.ctl("entitlement", "update", "shop", "--relaxation", "own-init")

    switched(lab, on=False)
    plan = lab.ctl("job", "plan", str(file))
    assert plan["unplaced"] == [0]
    why = "requirement not met: capability.own-init exists because"
    assert any(why in reason for reason in plan["reasons"]), plan["reasons"]
    lab.run("twinectl", "job", "apply", str(file))
    assert why in lab.ctl("job", "explain", "web")["summary"]
    switched(lab, on=True)
    lab.deploy("web", tmp_path, first)

    enter = ("task", "exec", "web-0", "--")
    state = lab.run("twinectl", *enter, "systemctl", "is-system-running", "--wait", timeout_s=900)
    assert state.strip() == "running"
    assert lab.run("twinectl", *enter, "sh", "-c", EDITION).strip() == "EDITION=first"
    with pytest.raises(Failed) as ended:
        lab.run("twinectl", *enter, "sh", "-c", "exit 7")
    assert ended.value.code == 7
    logs = ("task", "logs", "web-0")
    lab.until("its log", lambda: "hello: daemon in web-0" in lab.run("twinectl", *logs))

    pem = lab.run("twinectl", *enter, "cat", f"{HERE}/identity.pem")
    certificate = x509.load_pem_x509_certificate(pem[pem.index("-----BEGIN CERT") :].encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    (name,) = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert re.fullmatch(r"spiffe://[^/]+/entitlement/shop/job/web/task/web-0", name)
    bundle = lab.run("twinectl", *enter, "cat", f"{HERE}/bundle.pem")
    assert x509.load_pem_x509_certificates(bundle.encode())
    assert lab.run("twinectl", *enter, "sh", "-c", OWNER).strip() == "read"
    assert "Read-only file system" in lab.inside("web-0", f": > {HERE}/identity.pem")

    before = lab.invocations()["web-0"]
    lab.deploy("web", tmp_path, JOB.format(image=image, edition="second"))
    assert lab.invocations()["web-0"] != before
    assert lab.run("twinectl", *enter, "sh", "-c", EDITION).strip() == "EDITION=second"
    assert "hello: received SIGTERM" in lab.run("twinectl", *logs)

    lab.run("twinectl", "job", "stop", "web")
    left = "ls /run/twine/machines /run/twine/identities; pgrep -f '[s]ystemd-nspawn'"
    lab.until("nothing is left", lambda: not lab.ssh("m1", f"({left}) | grep -v : || true").strip())
    lab.until("its unit, too", lambda: lab.units("m1") == [])
    assert "all is accounted for" in lab.ssh("m1", "twine-agent fsck")
