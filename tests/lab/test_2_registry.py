"""OCI images from a real registry on a booted guest, run according to their configuration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from oci import Layout, entry, folder, layer

from tests.lab.images import BUSYBOX_FILES
from tests.lab.lab_client import BIN
from tests.lab.one_guest import OneGuest

pytestmark = pytest.mark.long
REGISTRY = "10.77.0.1:5000"
"""Address of the registry in the lab's own network, where its machines reach it."""
BIG = 8 << 20
OWN = "one line of its own\n"
SCRIPT = b"""#!/bin/busybox sh
busybox trap 'busybox echo asked to stop; exit 0' USR1
busybox echo "$GREETING from $(busybox pwd) by $*"
while :; do busybox sleep 1; done
"""
CONFIG = {
    "Entrypoint": ["/bin/start"],
    "Cmd": ["its", "command"],
    "Env": ["GREETING=hello", "PATH=/bin"],
    "WorkingDir": "/srv/work",
    "StopSignal": "SIGUSR1",
}
BASE = layer(
    *BUSYBOX_FILES,
    entry("big", data=os.urandom(BIG)),
)


def own(text: str) -> bytes:
    """Return an upper layer: a program, a working folder, and a line."""
    script = entry("bin/start", data=SCRIPT.replace(b"busybox trap", b"trap"), mode=0o755)
    return layer(folder("srv"), folder("srv/work"), script, entry("own", data=text.encode()))


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="registry")
    found.up()
    found.ssh("sed -i '1i registry_tls_verify = false' /etc/twine/agent.toml")
    found.ssh("systemctl start twine-agent.service", timeout_s=900)
    yield found
    found.down()


@pytest.fixture(scope="module")
def digests(guest: OneGuest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the digests of two images on one base, which a registry in the lab has."""
    top = tmp_path_factory.mktemp("registry")
    (top / "config.yml").write_text(
        "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {top}/data}}}}\n"
        f"http: {{addr: '{REGISTRY}'}}\n"
    )
    inside = [str(BIN / "twine-lab"), "exec", "--name", guest.name, "--"]
    serve = ["docker-registry", "serve", str(top / "config.yml")]
    with (top / "log").open("wb") as log:
        child = subprocess.Popen([*inside, *serve], stdout=log, stderr=log, start_new_session=True)
    try:
        found = {}
        for name in ("first", "second"):
            layout = Layout(top / name)
            found[name] = layout.image(BASE, own(OWN + name), config=CONFIG)
            copy = ["skopeo", "--insecure-policy", "copy", "-q", "--preserve-digests"]
            copy += ["--retry-times=10", "--dest-tls-verify=false", f"oci:{layout.path}"]
            subprocess.run([*inside, *copy, f"docker://{REGISTRY}/shop/{name}:1"], check=True)
        yield found
    finally:
        os.killpg(child.pid, signal.SIGTERM)  # the lab's command, and the registry that it runs
        child.wait()


def held_bytes(guest: OneGuest) -> int:
    """Return the bytes that the file system holds, after deleted data is freed."""
    usage = "btrfs filesystem usage --raw /var/lib/twine | sed -n 's/.*Used:[^0-9]*//p' | head -1"
    return int(
        guest.ssh(f"btrfs subvolume sync /var/lib/twine >/dev/null; sync; {usage}", timeout_s=600)
    )


@pytest.mark.behaviour("AG4")
def test_a_registry_image_runs_according_to_its_configuration(
    guest: OneGuest, digests: dict[str, str]
) -> None:
    """Entry point, command, variables, working directory and stop signal."""
    output = guest.ssh(f"twine-agent image pull {REGISTRY}/shop/first:1 2>&1", timeout_s=900)
    assert output.split()[-1] == digests["first"]
    assert "layer" in output, "a waiting client receives the progress"
    run = f"twine-agent run web --image oci:{REGISTRY}/shop/first:1 --memory 32MiB"
    guest.ssh(run, timeout_s=900)
    logs = "twine-agent logs web"
    guest.until("it says who it is", lambda: "hello from" in guest.find(logs))
    assert "hello from /srv/work by its command" in guest.ssh(logs)
    guest.ssh("twine-agent stop web", timeout_s=900)
    assert "asked to stop" in guest.ssh(logs), "by the image's own signal"


def test_a_second_image_on_the_same_base_downloads_only_its_own_layer(
    guest: OneGuest, digests: dict[str, str]
) -> None:
    guest.ssh(f"twine-agent image pull {REGISTRY}/shop/first:1 2>&1", timeout_s=900)
    before = held_bytes(guest)
    output = guest.ssh(f"twine-agent image pull {REGISTRY}/shop/second:1 2>&1", timeout_s=900)
    assert output.split()[-1] == digests["second"]
    assert held_bytes(guest) - before < BIG // 2, "the base is not there twice"
    images = json.loads(guest.ssh("twine-agent images -o json"))["images"]
    assert {image["digest"] for image in images} == set(digests.values())
    shared = [set(image["layers"]) for image in images]
    assert len(set.intersection(*shared)) == 1
    assert "all is accounted for" in guest.ssh("twine-agent fsck")


def test_an_image_with_a_wrong_digest_is_refused_and_removed(
    guest: OneGuest, digests: dict[str, str]
) -> None:
    wrong = "sha256:" + "0" * 64
    pull = f"twine-agent image pull {REGISTRY}/shop/second:1@{wrong} 2>&1; true"
    before = guest.ssh("ls /var/lib/twine/images /var/lib/twine/layers")
    assert wrong[:19] in guest.ssh(pull, timeout_s=900)
    assert guest.ssh("ls /var/lib/twine/images /var/lib/twine/layers") == before
    assert "all is accounted for" in guest.ssh("twine-agent fsck")


def test_an_unreachable_registry_is_reported_clearly(guest: OneGuest) -> None:
    output = guest.ssh("twine-agent image pull 10.77.0.1:5999/shop/x:1 2>&1; true", timeout_s=900)
    assert "10.77.0.1:5999/shop/x" in output
    assert "connection refused" in output, "skopeo's own reason"
    assert "Traceback" not in output


def test_nothing_is_left_of_images_that_are_removed(
    guest: OneGuest, digests: dict[str, str]
) -> None:
    for digest in digests.values():
        guest.ssh(f"twine-agent image rm {digest}")
    assert json.loads(guest.ssh("twine-agent images -o json"))["images"] == []

    guest.ssh("twine-agent gc")
    assert (
        guest.ssh("ls /var/lib/twine/images /var/lib/twine/layers | grep -c sha; true").strip()
        == "0"
    )
