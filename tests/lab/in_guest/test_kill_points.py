"""SIGKILL between any two steps of a run on a real kernel: detected, then finished or undone."""

from __future__ import annotations

import pytest
from guest_host import KILLED, GuestHost, profile

from agent.machine.kernelfs import KernelFs
from sidekick.report import ProfileState
from sidekick.status import status

FEW = 6
"""Number of kill points that CI tests in each run, evenly spaced; the long suite tests all."""

ONE = "[sysctl]\n'vm.swappiness'=10\n'vm.dirty_bytes'=8388608\n'net.core.somaxconn'=6144\n"
OTHER = (
    "[sysctl]\n'vm.swappiness'=1\n'vm.max_map_count'=262144\n"
    "[thp]\nenabled='never'\n[block]\nflash={read_ahead_kb=64}\nrotating={read_ahead_kb=64}\n"
    "[hugepages]\npages_2m=8\n[kernel]\ncmdline=['nosoftlockup']\n"
)
FAILS = (
    "[sysctl]\n'net.core.somaxconn'=7000\n'vm.max_map_count'=262144\n'vm.swappiness'=201\n"
    "[thp]\nenabled='never'\n"
)

CHANGED = (
    *(f"/proc/sys/vm/{name}" for name in ("swappiness", "dirty_bytes", "dirty_ratio")),
    *("/proc/sys/vm/max_map_count", "/proc/sys/net/core/somaxconn", "/proc/sys/vm/nr_hugepages"),
    "/sys/kernel/mm/transparent_hugepage/enabled",
    *("/sys/block/vda/queue/read_ahead_kb", "/etc/twine/boot-line"),
)

every = pytest.param(0, marks=pytest.mark.long, id="every")
some = pytest.param(FEW, id="some")
counts = pytest.mark.parametrize("count", [some, every])


@pytest.fixture
def on_one(host: GuestHost) -> GuestHost:
    """Yield the guest with the profile `one` applied; the switches go to `other` and `fails`."""
    profile("one", ONE)
    profile("other", OTHER)
    profile("fails", FAILS)
    host.apply("one")
    return host


def chosen(points: int, count: int) -> list[int]:
    """Return this number of the points 1 … `points`, evenly spaced; 0 means all."""
    if not count or count >= points:
        return list(range(1, points + 1))
    return sorted({1 + number * (points - 1) // (count - 1) for number in range(count)})


def values() -> dict[str, str | None]:
    """Return the values that the three profiles change; the fixture compares the guest later."""
    fs = KernelFs()
    return {path: fs.find(path) for path in CHANGED}


@pytest.mark.behaviour("F-65", "HP12")
@counts
@pytest.mark.parametrize("to", ["other", "fails"])
def test_f65_a_switch_that_is_killed_is_seen_and_then_finished_or_undone(
    on_one: GuestHost, to: str, count: int
) -> None:
    """`other` is applied; `fails` is rolled back half-way. So the kills hit apply and undo."""
    host = on_one
    as_one = values()
    host.apply("other")
    as_other = values()
    host.apply("one")
    points = host.points_of(lambda: host.apply(to))
    assert points > 15
    half = 0
    host.apply("one")
    for number, point in enumerate(chosen(points, count)):
        assert host.forked(lambda: host.apply(to), point) == KILLED, f"at point {point}"
        record = host.state.load()
        seen = status(host.host(), host.state)
        if record.applied and record.applied.name == "one" and values() != as_one:
            half += 1
            assert seen.state is ProfileState.DEGRADED, f"at point {point}"
            assert "interrupted while" in seen.detail
        assert record.originals, f"at point {point}"
        match number % 3:
            case 0:
                report = host.apply("other")
                assert report.state is ProfileState.PENDING_REBOOT, (point, report)
                assert values() == as_other, f"at point {point}"
                host.apply("one")
            case 1:
                assert host.apply("one").state is ProfileState.VERIFIED
            case 2:
                host.resume()
                host.apply("one")
        assert values() == as_one, f"at point {point}"
    assert half >= (1 if count else 5)


@pytest.mark.behaviour("F-65", "F-73", "HP12")
@counts
def test_f65_a_release_that_is_killed_is_finished_by_the_next_run(
    on_one: GuestHost, count: int
) -> None:
    host = on_one
    host.release()
    as_none = values()
    host.apply("other")
    points = host.points_of(host.release)
    for point in chosen(points, count):
        host.apply("other")
        assert host.forked(host.release, point) == KILLED, f"at point {point}"
        host.release()
        assert values() == as_none, f"at point {point}"


@pytest.mark.behaviour("F-65", "HP12")
@counts
def test_f65_a_boots_resume_that_is_killed_is_finished_by_the_next_one(
    on_one: GuestHost, count: int
) -> None:
    """The state is that after a boot: the kernel's defaults, and the record of the boot before.
    Real boots are in `test_0_boot_loader.py`.
    """
    host = on_one
    as_one = values()
    record = host.state.load()

    def as_booted() -> None:
        host.release()
        host.state.save(record)
        host.as_after_a_boot()

    as_booted()
    points = host.points_of(host.resume)
    assert values() == as_one
    for point in chosen(points, count):
        as_booted()
        assert host.forked(host.resume, point) == KILLED, f"at point {point}"
        assert host.resume().state is ProfileState.VERIFIED, f"at point {point}"
        assert values() == as_one, f"at point {point}"
        assert host.state.unfinished() is None
