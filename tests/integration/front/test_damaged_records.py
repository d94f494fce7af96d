"""No stored record prevents the control plane from starting."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agent.api import Location
from control_plane.api.capacity import EntitlementRecord, EntitlementSpec
from control_plane.api.machines import MachineRecord
from control_plane.client import ControlPlaneClient
from control_plane.store import Put
from control_plane.store.records import ENTITLEMENTS, QUARANTINE, encode
from control_plane.store.sqlite import SqliteStore

from .conftest import FACTS
from .test_daemon import START_S, Daemon

pytestmark = pytest.mark.behaviour("BUG-HT1")

HUGE = b"1" + b"0" * 400


def _machine(name: str) -> bytes:
    record = MachineRecord(
        machine=name, location=Location(), machine_type="small", facts=FACTS, address="127.0.0.1:9"
    )
    return encode(record)


async def _put(state: Path, records: dict[str, bytes]) -> None:
    async with SqliteStore(state / "store") as store:
        await store.txn({}, [Put(key, value) for key, value in records.items()])


async def _stored(state: Path, key: str) -> bytes | None:
    async with SqliteStore(state / "store") as store:
        entry = await store.get(key)
        return None if entry is None else entry.value


def _check(state: Path, *more: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "control_plane.daemon", "check-store", "--state", str(state)]
    done = subprocess.run(
        [*command, *more], capture_output=True, text=True, timeout=START_S, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


async def _seen(socket: Path) -> tuple[list[str], str, str]:
    async with ControlPlaneClient(f"unix:{socket}") as client:
        machines = (await client.list_machines()).machines
        assert (await client.get_capacity()) is not None
        ready = await client.readyz()
        facts = ["" if m.record.facts is None else "facts" for m in machines]
        named = [f"{m.record.machine} {known}" for m, known in zip(machines, facts, strict=True)]
        async with client._open().get("http://local/metrics") as answer:
            return named, ready.detail, await answer.text()


@pytest.mark.behaviour("BUG-HT1")
@pytest.mark.parametrize("field", ["memory_bytes", "cpus"])
def test_facts_that_cannot_be_computed_with_do_not_stop_a_start(tmp_path: Path, field: str) -> None:
    """Regression: one host's facts of 10^400 stopped every start of the control plane."""
    state = tmp_path / "state"
    state.mkdir()
    value = getattr(FACTS, field)
    bad = _machine("vm1").replace(f'"{field}":{value}'.encode(), f'"{field}":'.encode() + HUGE)
    assert HUGE in bad
    wild = EntitlementRecord(name="wild", spec=EntitlementSpec(machines=1))
    asyncio.run(
        _put(
            state,
            {
                "machines/dc1/vm1": bad,
                "machines/dc1/vm2": _machine("vm2"),
                "machines/dc1/vm3": b"\x00 no record at all",
                f"{ENTITLEMENTS}wild": encode(wild).replace(b'"rru":null', b'"rru":1e308'),
            },
        )
    )
    assert _check(state)[0] == 2

    daemon = Daemon(tmp_path)
    try:
        assert "READY=1" in daemon.wait_ready()
        machines, detail, metrics = asyncio.run(_seen(daemon.socket))
    finally:
        code, output = daemon.end()

    assert (machines, code) == (["vm1 ", "vm2 facts"], 0)
    assert "3 damaged records are set aside" in detail
    assert "twine_quarantined_records 3.0" in metrics
    named = {
        line["record"]
        for line in map(json.loads, re.findall(r"^\{.*\}$", output, re.M))
        if "set aside" in line.get("message", "")
    }
    assert named == {"machines/dc1/vm1", "machines/dc1/vm3", f"{ENTITLEMENTS}wild"}
    assert HUGE in (asyncio.run(_stored(state, f"{QUARANTINE}machines/dc1/vm1")) or b"")

    code, text = _check(state)
    assert code == 2
    assert text.count("set aside") == 3
    for name in ("machines/dc1/vm1", "machines/dc1/vm3", f"{ENTITLEMENTS}wild"):
        assert _check(state, "--forget", name)[0] in (0, 2)
    assert _check(state) == (0, "all stored records are usable\n")


@pytest.mark.behaviour("BUG-HT1")
def test_an_operator_sets_one_record_aside(tmp_path: Path) -> None:
    """The operator names the record, and it is kept until an operator deletes it."""
    state = tmp_path / "state"
    state.mkdir()
    asyncio.run(_put(state, {"machines/dc1/vm2": _machine("vm2")}))
    assert _check(state) == (0, "all stored records are usable\n")
    assert _check(state, "--quarantine", "machines/dc1/no")[0] == 3
    code, text = _check(state, "--quarantine", "machines/dc1/vm2")
    assert (code, "machines/dc1/vm2: set aside" in text) == (2, True)
    assert asyncio.run(_stored(state, "machines/dc1/vm2")) is None
    assert asyncio.run(_stored(state, f"{QUARANTINE}machines/dc1/vm2")) == _machine("vm2")
    assert "dropped" in _check(state, "--forget", "machines/dc1/vm2")[1]
    assert _check(state)[0] == 0
