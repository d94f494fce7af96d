"""A crash at every step is visible, and the next run finishes or undoes the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_host import Crash, FakeHost, a_target

from sidekick import status as standing
from sidekick.record import Target
from sidekick.report import ProfileState
from sidekick.setting import Host
from sidekick.settings.hugepages import Hugepages
from sidekick.state import StateFolder

WEB = {"vm.swappiness": 10, "net.core.somaxconn": 6144, "vm.dirty_bytes": 8388608}
CACHE = {"vm.swappiness": 1, "vm.max_map_count": 262144}


def web(fake: FakeHost) -> Target:
    return a_target(fake, "web", sysctl=WEB)


def cache(fake: FakeHost) -> Target:
    pages, line = Hugepages(pages_2m=16), ("transparent_hugepage=never",)
    return a_target(fake, "cache", sysctl=CACHE, hugepages=pages, cmdline=line)


def bad(fake: FakeHost) -> Target:
    return a_target(fake, "bad", sysctl={**CACHE, "vm.swappiness": 300, "kernel.panic": 9})


def run(fake: FakeHost, target: Target) -> None:
    fake.apply(target)


def points_of(folder: Path, target: Callable[[FakeHost], Target]) -> int:
    fake = FakeHost(folder)
    run(fake, web(fake))
    before = fake.points.passed
    run(fake, target(fake))
    return fake.points.passed - before


def crashed(folder: Path, point: int, target: Callable[[FakeHost], Target]) -> FakeHost:
    """Return a host on which a switch from web to another profile was killed."""
    fake = FakeHost(folder)
    fake.untouched = fake.everything()  # type: ignore[attr-defined]
    run(fake, web(fake))
    fake.points.at = fake.points.passed + point
    with pytest.raises(Crash):
        run(fake, target(fake))
    fake.points.at = None
    return fake


@pytest.mark.behaviour("HP12", "F-65")
@pytest.mark.parametrize("target", [cache, bad])
def test_a_crash_at_any_point_is_seen_finished_and_undone(
    tmp_path: Path, target: Callable[[FakeHost], Target]
) -> None:
    points = points_of(tmp_path / "count", target)
    assert points > 20
    as_web = reference(tmp_path / "web").live()
    as_cache = reference(tmp_path / "cache", cache).live()
    half = 0
    for point in range(1, points + 1):
        fake = crashed(tmp_path / str(point), point, target)
        changed = fake.live() != as_web
        status = standing.status(fake.host(), fake.state)
        if changed and fake.state.load().applied == web(fake):
            half += 1
            assert status.state is ProfileState.DEGRADED, f"at point {point}"
            assert "interrupted while" in status.detail
        assert fake.state.load().originals, f"at point {point}"
        if point % 3 == 0:
            run(fake, cache(fake))
            assert fake.live() == as_cache
        elif point % 3 == 1:
            run(fake, web(fake))
            assert fake.live() == as_web
        run(fake, Target())
        assert fake.everything() == fake.untouched  # type: ignore[attr-defined]
        assert standing.status(fake.host(), fake.state).state is ProfileState.NONE
    assert half > 3


@pytest.mark.behaviour("BUG-SK83")
@pytest.mark.parametrize("target", [cache, bad, lambda _: Target()])
def test_a_run_that_was_killed_after_its_final_record_is_not_interrupted(
    tmp_path: Path, target: Callable[[FakeHost], Target]
) -> None:
    """Formerly `status` reported an interrupted run until the next one removed the journal."""
    ended = 0
    expected = standing.status(*status_of(reference(tmp_path / "ended", target)))
    final = reference(tmp_path / "record", target).state.load()
    for point in range(1, points_of(tmp_path / "count", target) + 1):
        fake = crashed(tmp_path / str(point), point, target)
        journal = fake.state.folder / "journal.jsonl"
        if not journal.exists() or fake.state.load() != final:
            continue
        ended += 1
        status = standing.status(*status_of(fake))
        assert (status.name, status.state, status.detail, status.effective) == (
            expected.name,
            expected.state,
            expected.detail,
            expected.effective,
        ), f"at point {point}"
        assert fake.state.unfinished() is None
    assert ended > 2


def status_of(fake: FakeHost) -> tuple[Host, StateFolder]:
    return fake.host(), fake.state


def reference(folder: Path, target: Callable[[FakeHost], Target] = web) -> FakeHost:
    fake = FakeHost(folder)
    run(fake, web(fake))
    run(fake, target(fake))
    return fake


def test_status_counts_writes(tmp_path: Path) -> None:
    details = set()
    for point in range(1, points_of(tmp_path / "count", cache)):
        fake = crashed(tmp_path / str(point), point, cache)
        details.add(standing.status(fake.host(), fake.state).detail.partition(";")[0])
    assert {f"interrupted while applying cache: {n} of 6 written" for n in range(7)} <= details


def test_status_of_a_run_under_way_is_applying(fake: FakeHost) -> None:
    seen = []

    def rounded(value: str) -> str:
        seen.append(standing.status(fake.host(), fake.state))
        return value

    fake.fs.rounds["/proc/sys/net/core/somaxconn"] = rounded
    host = fake.host()
    with fake.state.lock(0, host.monotonic, host.sleep):
        run(fake, web(fake))
    assert seen[0].state is ProfileState.APPLYING
    assert seen[0].detail == "applying web: 1 of 3 written"


def test_a_failure_after_a_crash_goes_back_to_the_profile_before_the_crash(
    tmp_path: Path,
) -> None:
    before = reference(tmp_path / "web").live()
    for point in range(1, points_of(tmp_path / "count", cache)):
        fake = crashed(tmp_path / str(point), point, cache)
        if fake.state.load().applied != web(fake):
            continue
        report = fake.apply(bad(fake))
        assert report.rolled_back, f"at point {point}"
        assert fake.live() == before
        assert standing.verify(fake.host(), fake.state).effective == "web"
        assert fake.state.unfinished() is None


@pytest.mark.behaviour("F-65")
def test_a_boot_finishes_what_the_power_cut_interrupted(tmp_path: Path) -> None:
    as_web = reference(tmp_path / "web").live()
    as_cache = reference(tmp_path / "cache", cache).live()
    for point in range(10, points_of(tmp_path / "count", cache), 3):
        fake = crashed(tmp_path / str(point), point, cache)
        begun = fake.state.unfinished() is not None or fake.state.load().applied == cache(fake)
        fake.boot()
        report = fake.resume()
        assert report.name == ("cache" if begun else "web")
        assert report.state in (ProfileState.PENDING_REBOOT, ProfileState.VERIFIED)
        assert fake.live() == (as_cache if begun else as_web)


def test_a_boot_does_not_complete_an_interrupted_rollback(tmp_path: Path) -> None:
    for point in range(1, points_of(tmp_path / "count", bad)):
        fake = crashed(tmp_path / str(point), point, bad)
        unfinished = fake.state.unfinished()
        if unfinished is None or unfinished.undoing is None:
            continue
        fake.boot()
        assert fake.resume().name == "web"
        break
    else:
        pytest.fail("no point lies in the undoing")
