"""Image pulls on a booted guest: concurrent ones, a registry that is cut or hangs, and gc."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from oci import Layout, entry, layer

from tests.lab.images import BUSYBOX_FILES
from tests.lab.lab_client import BIN
from tests.lab.one_guest import OneGuest
from wire import signatures

pytestmark = pytest.mark.long
ADDRESS, PORT, RELAY_PORT = "10.77.0.1", 5000, 5001
RELAY = Path(__file__).with_name("held_relay.py")
BIG, OWN = 8 << 20, 1 << 20
PULLS = 10
IMAGES = ("one", "two", "three", "packed")
LAYERS = "/var/lib/twine/layers"
CONFIG = {"Entrypoint": ["/bin/busybox", "sleep", "100000"]}


class InTheLab:
    """A program in the lab's network, with the lab's command that runs it."""

    def __init__(self, guest: OneGuest, log: Path, *argv: str) -> None:
        inside = [str(BIN / "twine-lab"), "exec", "--name", guest.name, "--"]
        self.log = log
        with log.open("ab") as file:
            self._child = subprocess.Popen(
                [*inside, *argv], stdout=file, stderr=file, start_new_session=True
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and its process group."""
        os.killpg(self._child.pid, number)

    def end(self) -> None:
        """End it; a second call does nothing."""
        if self._child.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            self._child.wait()


@dataclass
class Shop:
    """A registry with its images, and a relay to it that can hold its responses."""

    guest: OneGuest
    top: Path
    registry: InTheLab
    relay: InTheLab
    digests: dict[str, str]
    base: str
    """Digest of the packed layer that three images have in common."""

    @property
    def hold(self) -> Path:
        return self.top / "hold"

    def start_relay(self) -> None:
        argv = (sys.executable, str(RELAY), str(RELAY_PORT), str(PORT), str(self.hold))
        self.relay = InTheLab(self.guest, self.top / "relay.log", *argv)
        probe = f"curl -s -o /dev/null http://{ADDRESS}:{RELAY_PORT}/v2/ && echo yes"
        self.guest.until("the relay answers", lambda: self.guest.find(probe) == "yes")

    def fetched(self, digest: str) -> int:
        """Return the number of requests for a blob so far."""
        lines = self.registry.log.read_text(errors="replace").splitlines()
        return sum('"GET ' in line and digest in line for line in lines)

    def asks(self, name: str, number: int = 0, port: int = PORT) -> str:
        """Return a command that pulls an image in the background; see `answer`."""
        body = json.dumps({"reference": f"{ADDRESS}:{port}/shop/{name}:1"})
        out = f"/root/{name}-{number}"
        ask = f"{call('POST', 'images:oci')} -d {shlex.quote(body)} -o {out}.part"
        ask += f"; mv {out}.part {out}"
        return f"rm -f {out}; (nohup sh -c {shlex.quote(ask)} >/dev/null 2>&1 </dev/null &)"

    def answer(self, name: str, number: int = 0) -> dict[str, Any]:
        """Return the agent's response."""
        out = f"/root/{name}-{number}"
        self.guest.until(f"{name} is answered", lambda: bool(self.guest.find(f"cat {out}")))
        found: dict[str, Any] = json.loads(self.guest.ssh(f"cat {out}"))
        return found

    def pull(self, name: str) -> None:
        self.guest.ssh(self.asks(name))
        assert self.answer(name).get("digest") == self.digests[name]

    def pull_until_held(self, name: str) -> None:
        """Begin a pull whose layers are held back, and return when they begin to arrive."""
        waits = self.hold.with_suffix(".waits")
        waits.unlink(missing_ok=True)
        self.hold.touch()
        self.guest.ssh(self.asks(name, port=RELAY_PORT))
        self.guest.until("a layer is in transfer", waits.exists)

    def remove(self, *names: str) -> str:
        """Remove images and unused layers; return the remaining layers."""
        for name in names:
            self.guest.ssh(f"{call('DELETE', 'images/' + self.digests[name])} -f -o /dev/null")
        self.guest.ssh(f"{call('POST', 'images:collect')} -f -o /dev/null")
        return self.guest.ssh(f"ls {LAYERS}")


def call(method: str, path: str) -> str:
    """Return a command that calls the agent, without the seconds that starting `twinectl` takes."""
    how = "-sS --unix-socket /run/twine/agent.sock -H 'content-type: application/json'"
    return f"curl {how} -X {method} http://agent/v1/{path}"


@pytest.fixture(scope="module")
def guest() -> Iterator[OneGuest]:
    found = OneGuest(name="pulls")
    found.up()
    found.ssh("sed -i '1i registry_tls_verify = false' /etc/twine/agent.toml")
    found.ssh("systemctl start twine-agent.service", timeout_s=900)
    yield found
    found.down()


@pytest.fixture(scope="module")
def shop(guest: OneGuest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    top = tmp_path_factory.mktemp("registry")
    (top / "config.yml").write_text(
        "version: 0.1\nlog: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: {top}/data}}}}\n"
        f"http: {{addr: '{ADDRESS}:{PORT}'}}\n"
    )
    serve = ("docker-registry", "serve", str(top / "config.yml"))
    registry = InTheLab(guest, top / "log", *serve)
    try:
        base = layer(*BUSYBOX_FILES, entry("big", data=os.urandom(BIG)))
        digests, packed = {}, ""
        for name in IMAGES:
            layout = Layout(top / name)
            own = layer(entry("own", data=name.encode()), entry("some", data=os.urandom(OWN)))
            how = "zstd" if name == "packed" else "gzip"
            digests[name] = layout.image(base, own, how=how, config=CONFIG)
            manifest = json.loads((layout.path / "blobs/sha256" / digests[name][7:]).read_bytes())
            packed = packed or manifest["layers"][0]["digest"]
            copy = ["skopeo", "--insecure-policy", "copy", "-q", "--preserve-digests"]
            copy += ["--retry-times=10", "--dest-tls-verify=false", f"oci:{layout.path}"]
            inside = [str(BIN / "twine-lab"), "exec", "--name", guest.name, "--"]
            target = f"docker://{ADDRESS}:{PORT}/shop/{name}:1"
            subprocess.run([*inside, *copy, target], check=True)
        found = Shop(guest, top, registry, registry, digests, packed)
        found.start_relay()
        yield found
        found.relay.end()
    finally:
        registry.end()


@pytest.mark.behaviour("AG3")
def test_ten_requests_at_once_share_one_download(guest: OneGuest, shop: Shop) -> None:
    """The requests are for one image; the registry counts the downloads."""
    before = shop.fetched(shop.base)
    guest.ssh("; ".join(shop.asks("one", number) for number in range(PULLS)))
    digests = {shop.answer("one", number).get("digest") for number in range(PULLS)}
    assert digests == {shop.digests["one"]}
    assert shop.fetched(shop.base) - before == 1


def test_the_base_of_an_image_in_transfer_is_not_collected(guest: OneGuest, shop: Shop) -> None:
    """The base is not downloaded either, as it is already on the host."""
    before = shop.fetched(shop.base)
    shop.pull_until_held("two")
    left = shop.remove("one")
    assert left.count(".json") == 1, "the base stays, what was the first one's own is gone"
    assert "all is accounted for" in guest.ssh("twine-agent fsck")
    shop.hold.unlink()
    assert shop.answer("two").get("digest") == shop.digests["two"]
    assert shop.fetched(shop.base) == before
    assert shop.remove("two").strip() == "", "nothing is held once the image is there"


def test_concurrent_pulls_with_one_base_download_it_once(guest: OneGuest, shop: Shop) -> None:
    before = shop.fetched(shop.base)
    names = ("one", "two", "three")
    guest.ssh("; ".join(shop.asks(name) for name in names))
    for name in names:
        assert shop.answer(name).get("digest") == shop.digests[name]
    assert shop.fetched(shop.base) - before == 1
    assert shop.remove(*names).strip() == ""


def test_an_interrupted_pull_is_reported_and_the_next_one_is_complete(
    guest: OneGuest, shop: Shop
) -> None:
    shop.pull_until_held("one")
    shop.relay.end()
    answer_text = shop.answer("one")
    assert answer_text["code"] == "unprocessable", answer_text
    assert "cannot fetch docker://10.77.0.1:5001/shop/one" in answer_text["detail"]
    assert guest.ssh("ls /var/lib/twine/staging").strip() == ""
    shop.hold.unlink()
    shop.start_relay()
    shop.pull("one")
    assert shop.remove("one").strip() == ""


def test_an_agent_restart_during_a_pull_leaves_no_files(guest: OneGuest, shop: Shop) -> None:
    shop.pull_until_held("one")
    guest.ssh("systemctl kill --signal=KILL twine-agent.service; systemctl start twine-agent")
    ready = call("GET", "images") + " -f -o /dev/null && echo yes"
    guest.until("the agent is back", lambda: guest.find(ready) == "yes")
    units = "systemctl list-units --no-legend 'twine-fetch-*' 'twine-unpack-*'"
    assert guest.ssh(f"ls /var/lib/twine/staging; {units}").strip() == ""
    shop.hold.unlink()
    shop.pull("one")
    assert "all is accounted for" in guest.ssh("twine-agent fsck")


def test_a_hanging_registry_delays_nothing_else(guest: OneGuest, shop: Shop) -> None:
    """An image on the host starts, is stopped and removed meanwhile; then the pull continues."""
    shop.pull("one")
    shop.registry.signal(signal.SIGSTOP)
    guest.ssh(shop.asks("packed"))
    guest.until("it is asked", lambda: "twine-fetch" in guest.find("systemctl list-units -q"))
    guest.ssh(f"twine-agent run web --image {shop.digests['one']} --memory 32MiB", timeout_s=900)
    guest.ssh("twine-agent stop web", timeout_s=900)
    assert shop.remove("one").strip() == ""
    assert guest.find("cat /root/packed-0") == "", "the pull waits"
    shop.registry.signal(signal.SIGCONT)
    assert shop.answer("packed").get("digest") == shop.digests["packed"]


def test_an_image_of_zstd_layers_runs(guest: OneGuest, shop: Shop) -> None:
    """The host's zstd unpacks its layers."""
    shop.pull("packed")
    guest.ssh(f"twine-agent run web --image {shop.digests['packed']} --memory 32MiB")
    assert guest.ssh("twine-agent exec web -- /bin/busybox cat /own").strip() == "packed"
    guest.ssh("twine-agent stop web", timeout_s=900)


def test_a_task_with_an_untrusted_image_is_refused_with_the_reason(
    guest: OneGuest, shop: Shop
) -> None:
    """The trust settings are those that a control plane sends: the keys of an entitlement."""
    shop.pull("packed")
    digest = shop.digests["packed"]
    key, other = signatures.new_key(), signatures.new_key()

    def put(pem: bytes | None, of: str = digest) -> str:
        found = []
        if pem is not None:
            by, made = signatures.sign(pem, "web/1", of)
            found = [{"name": "web/1", "key": by, "signature": made}]
        trust = {"keys": [signatures.public_key(key)], "signatures": found}
        spec = {"image": digest, "limits": {"memory_max_bytes": 32 << 20}, "image_trust": trust}
        guest.put("/root/spec", json.dumps(spec))
        return guest.ssh(f"{call('PUT', 'tasks/signed')} -d @/root/spec")

    for answer_text, why in (
        (put(None), "it has no signature"),
        (put(other), "only other keys signed it"),
        (put(key, "sha256:" + "9" * 64), "the stored signature does not match this image"),
    ):
        assert (
            f"image {digest} is not signed with the key, which its entitlement requires"
            in answer_text
        )
        assert why in answer_text
    assert "signed" not in guest.ssh("twine-agent ps")
    assert '"generation":1' in put(key)
    guest.ssh("twine-agent stop signed", timeout_s=900)


def test_nothing_is_left_in_the_end(guest: OneGuest, shop: Shop) -> None:
    shop.pull("packed")
    assert shop.remove("packed").strip() == ""
    accounts = json.loads(guest.ssh("twine-agent gc --explain -o json"))["accounts"]
    kinds = {account["kind"] for account in accounts}
    assert kinds.isdisjoint({"image", "layer", "staging", "root"}), accounts
    assert [account for account in accounts if account["wrong"] or not account["stays"]] == []
    assert guest.ssh(f"ls /var/lib/twine/images {LAYERS} | grep -c sha; true").strip() == "0"
    assert "all is accounted for" in guest.ssh("twine-agent fsck")
