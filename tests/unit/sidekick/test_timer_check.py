"""The timer's check of an unchanged host reads again what the last verify read."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_host import PROFILES
from recorded import NAMES, RecordedHost

from agent.machine import ethtool
from sidekick import look
from sidekick.cli import main
from sidekick.report import ApplyOutcome, Report
from sidekick.setting import Host

SHIPPED = sorted(path.stem for path in PROFILES.glob("*.toml") if path.stem != "batch")
"""All profiles that can be verified without a boot."""
SWAPPINESS = "/proc/sys/vm/swappiness"


@pytest.fixture(params=["intel", "amd", "vm"])
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RecordedHost]:
    return RecordedHost(tmp_path, request.param)


def sidekick(fake: RecordedHost, *arguments: str) -> int:
    options = [f"--root={fake.root}", f"--state={fake.state.folder}", f"--profiles={PROFILES}"]

    def host(root: Path) -> Host:
        return fake.host(root)

    return main([*options, *arguments], make_host=host)


def is_unchanged(fake: RecordedHost) -> bool:
    return look.is_unchanged(str(fake.state.folder))


def last(fake: RecordedHost) -> Report:
    found = fake.state.read_status()
    assert found
    return found


@pytest.mark.behaviour("F-72", "HP15")
def test_an_unchanged_host_gets_the_same_report_with_new_times(
    fake: RecordedHost,
) -> None:
    assert sidekick(fake, "apply-profile", "web") == 0
    assert not is_unchanged(fake), "nothing was kept before the first look"
    assert sidekick(fake, "verify", "--timer") == 0
    full = last(fake)
    assert is_unchanged(fake)
    quick = last(fake)
    assert (quick.at, quick.uptime_s) != (full.at, full.uptime_s)
    assert quick.at > 1_700_000_000.0
    assert 0 < quick.uptime_s < quick.at
    same = {"at": 0.0, "uptime_s": 0.0}
    assert {**_plain(quick), **same} == {**_plain(full), **same}


def _plain(report: Report) -> dict[str, object]:
    return {name: getattr(report, name) for name in report.__struct_fields__}


@pytest.mark.behaviour("F-72", "HP15")
def test_all_that_a_profile_sets_is_seen_when_it_changes(
    fake: RecordedHost,
) -> None:
    """A look detects every change that a full verify reports as drift."""
    assert sidekick(fake, "apply-profile", "memcache") == 0
    assert sidekick(fake, "verify", "--timer") == 0
    kept = (fake.state.folder / look.READS).read_bytes()
    moving = b"/proc/meminfo"  # another test covers it
    texts = [p for kind, p, _ in look.decode_records(kept) if kind == look.TEXT]
    files = [p for p in texts if not p.endswith(moving)]
    assert len(files) > 20
    for path in files:
        before = Path(os.fsdecode(path)).read_bytes()
        Path(os.fsdecode(path)).write_bytes(b"changed")
        assert not is_unchanged(fake), path
        Path(os.fsdecode(path)).unlink()
        assert not is_unchanged(fake), path
        Path(os.fsdecode(path)).write_bytes(before)
        assert is_unchanged(fake), path


@pytest.mark.behaviour("F-72")
def test_drift_is_left_to_the_full_check(fake: RecordedHost) -> None:
    assert sidekick(fake, "apply-profile", "web") == 0
    assert sidekick(fake, "verify", "--timer") == 0
    fake.fs.write(SWAPPINESS, "77")
    status = (fake.state.folder / "status.json").read_bytes()
    assert not is_unchanged(fake)
    assert (fake.state.folder / "status.json").read_bytes() == status
    assert sidekick(fake, "verify", "--timer") == 2
    outcomes = {s.setting: s.outcome for s in last(fake).settings}
    assert outcomes["sysctl.vm.swappiness"] is ApplyOutcome.DRIFTED
    assert not is_unchanged(fake), "drift is not kept: each check of it is a full one"


@pytest.mark.behaviour("HP15")
@pytest.mark.parametrize(
    "arguments",
    [("apply-profile", "cache"), ("rollback",), ("verify",), ("try", "web", "--for=60s")],
)
def test_any_other_run_ends_the_kept_state(fake: RecordedHost, arguments: tuple[str, ...]) -> None:

    assert sidekick(fake, "apply-profile", "web") == 0
    assert sidekick(fake, "verify", "--timer") == 0
    assert is_unchanged(fake)
    sidekick(fake, *arguments)
    assert not is_unchanged(fake)


@pytest.mark.behaviour("HP15")
def test_another_boot_ends_the_kept_state(fake: RecordedHost) -> None:
    assert sidekick(fake, "apply-profile", "web") == 0
    assert sidekick(fake, "verify", "--timer") == 0
    fake.fs.write("/proc/sys/kernel/random/boot_id", "another")
    assert not is_unchanged(fake)


@pytest.mark.behaviour("F-71")
def test_while_another_sidekick_works_nothing_is_renewed(fake: RecordedHost) -> None:
    assert sidekick(fake, "apply-profile", "web") == 0
    assert sidekick(fake, "verify", "--timer") == 0
    kept = (fake.state.folder / look.READS).read_bytes()
    with fake.state.lock(0.0, lambda: 0.0, lambda s: None):
        (fake.state.folder / look.READS).write_bytes(kept)
        assert not is_unchanged(fake)
    assert is_unchanged(fake)


@pytest.mark.behaviour("F-72")
def test_a_value_that_changes_on_its_own_is_no_drift(fake: RecordedHost) -> None:
    """Seen on a guest: free memory differed at each look, so each look was a full verify."""
    assert sidekick(fake, "apply-profile", "web") == 0
    assert sidekick(fake, "verify", "--timer") == 0
    memory = Path(fake.fs.path("/proc/meminfo"))
    before = memory.read_text()
    memory.write_text(before + "MemFree: 12345 kB\nCached: 1 kB\n")
    assert is_unchanged(fake)
    memory.write_text(before.replace("MemTotal:", "MemTotal: 9"))
    reads_memory = b"/proc/meminfo" in (fake.state.folder / look.READS).read_bytes()
    assert reads_memory or fake.name == "vm", "without a pool no setting reads the memory"
    assert is_unchanged(fake) is not reads_memory


@pytest.mark.parametrize("torn", [0, 3, 40, -1])
def test_partly_stored_state_is_not_used(fake: RecordedHost, torn: int) -> None:
    assert sidekick(fake, "apply-profile", "web") == 0
    assert sidekick(fake, "verify", "--timer") == 0
    path = fake.state.folder / look.READS
    path.write_bytes(path.read_bytes()[:torn])
    assert not is_unchanged(fake)


@pytest.mark.behaviour("HP15")
def test_every_shipped_profile_allows_the_short_check_on_some_host(tmp_path: Path) -> None:

    able = set()
    for name in NAMES:
        fake = RecordedHost(tmp_path / name, name)
        for profile in SHIPPED:
            if sidekick(fake, "apply-profile", profile) == 0:
                assert sidekick(fake, "verify", "--timer") == 0
                able |= {profile} if is_unchanged(fake) else set()
            sidekick(fake, "rollback")
    assert able == {*SHIPPED}


def test_a_network_interface_is_queried_as_the_agent_queries_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`look` is a script that imports none of our code, so it has its own number of the call."""
    calls = list[tuple[int, bytes]]()
    monkeypatch.setattr(fcntl, "ioctl", lambda _, number, request: calls.append((number, request)))
    assert look.read_again(look.ANSWER, b"eth0 16 4") == bytes(16)
    [(number, request)] = calls
    assert number == ethtool.SIOCETHTOOL
    assert request.startswith(b"eth0\0")
