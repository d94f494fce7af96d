"""Two tasks that authenticate each other by their own identities (docs/credentials.md)."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.images import busybox_image
from tests.lab.one_machine import OneMachine

HERE = "/run/twine-identity"
FILES = f"-cert {HERE}/identity.pem -key {HERE}/identity.pem -CAfile {HERE}/bundle.pem"
JOB = """
entitlement = "shop"
tasks = 1
image = "{image}"
identity = true
[limits]
memory_max_bytes = "48MiB"
"""
SERVER = f"exec openssl s_server -quiet -accept ${{port:tls}} {FILES} -Verify 1 -www"
SERVE = f'ports = ["tls"]\ncommand = ["/bin/sh", "-c", "{SERVER} -verify_return_error"]\n'
SLEEP = 'command = ["/bin/busybox", "sleep", "100000"]\n'


def with_openssl(image: bytes) -> bytes:
    """Return an image that also has this host's openssl and its libraries."""
    program = shutil.which("openssl")
    assert program is not None, "openssl is missing: apt install openssl"
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    out = io.BytesIO(image)
    with tarfile.open(fileobj=out, mode="a") as tar:
        for path in (program, *re.findall(r"/[^ )]+", listed)):
            tar.add(Path(path).resolve(), path.lstrip("/"))
    return out.getvalue()


def serial(lab: OneMachine, task: str) -> str:
    found = lab.inside(task, f"openssl x509 -noout -serial -in {HERE}/identity.pem")
    return next((s for s in found.split() if s.startswith("serial=")), "")


@pytest.fixture(scope="module")
def lab() -> Iterator[OneMachine]:
    found = OneMachine("identity")
    found.up()
    yield found
    found.down()


@pytest.mark.behaviour("AG10")
@pytest.mark.long
def test_tasks_authenticate_each_other_and_get_new_keys_while_running(
    lab: OneMachine, tmp_path: Path
) -> None:
    """Mutual TLS uses only the files that each task finds, through a renewal and a task's end."""
    (tmp_path / "image.tar").write_bytes(with_openssl(busybox_image()))
    image = lab.ctl("image", "push", str(tmp_path / "image.tar"))["digest"]
    lab.ctl("entitlement", "create", "shop", "--machines", "1", "--host-profile", "base")
    lab.deploy("db", tmp_path, SERVE + JOB.format(image=image))
    lab.deploy("web", tmp_path, SLEEP + JOB.format(image=image))
    lab.deploy("plain", tmp_path, SLEEP + JOB.format(image=image).replace("true", "false"))

    port = lab.tasks("db")[0]["placement"]["ports"]["tls"]
    ask = 'printf "GET / HTTP/1.0\\r\\n\\r\\n" | openssl s_client -ign_eof'
    ask += f" -connect 127.0.0.1:{port} -verify_return_error -CAfile {HERE}/bundle.pem"
    call = f"{ask} {FILES}"
    response = lab.inside("web-0", call)
    assert "Verify return code: 0 (ok)" in response
    assert "HTTP/1.0 200 ok" in response
    assert "HTTP/1.0 200 ok" not in lab.inside("web-0", ask), "who shows nothing gets nothing"
    shown = lab.inside("web-0", f"{call} 2>/dev/null | openssl x509 -noout -ext subjectAltName")
    assert "URI:spiffe://twine/entitlement/shop/job/db/task/db-0" in shown

    assert "Read-only file system" in lab.inside("web-0", f": > {HERE}/identity.pem")
    assert "No such file" in lab.inside("plain-0", f"cat {HERE}/identity.pem")
    other = "setpriv --reuid 65534 --clear-groups cat /run/twine/identities/web-0/identity.pem"
    assert "Permission denied" in lab.ssh("m1", f"{other} 2>&1 || true")
    line = "$(sed -n 2p /run/twine/identities/web-0/identity.pem)"
    on_disk = f'grep -ral -- "{line}" /var/lib/twine /etc /run/systemd /tmp || echo nowhere'
    assert lab.ssh("m1", on_disk).strip() == "nowhere"

    first, before = serial(lab, "web-0"), lab.invocations()["web-0"]
    due = """sed -i 's/"renew_at":[0-9.]*/"renew_at":1.0/' /run/twine/identities/web-0.json"""
    lab.ssh("m1", due)
    lab.until("the task sees its next key", lambda: serial(lab, "web-0") not in ("", first))
    assert lab.invocations()["web-0"] == before
    assert "HTTP/1.0 200 ok" in lab.inside("web-0", call)

    lab.run("twinectl", "job", "stop", "web")
    lab.until(
        "its identity is gone with it",
        lambda: lab.ssh("m1", "ls /run/twine/identities").split() == ["db-0", "db-0.json"],
    )
