"""Bars of waves and settings, the stream of a log, and states of machines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from msgspec.structs import replace
from virtual_time import VirtualLoop, run

from agent.api import Location
from control_plane.api.machines import EventKind, MachineRecord, UnavailabilityEvent
from control_plane.api.maintenance import WaveState, WaveView
from control_plane.api.profiles import SettingTimes
from control_plane.broker.core.region_map import state_of
from control_plane.identity.sessions import BrowserSessions, SessionEnded
from control_plane.web import streams
from control_plane.web.core.spans import setting_chart, wave_chart

pytestmark = pytest.mark.behaviour("FE1", "FE7")


def wave(number: int, start: float | None, deadline: float | None, done: int = 0) -> WaveView:
    return WaveView(
        number=number,
        state=WaveState.WAITING,
        machines=4,
        done=done,
        start=start,
        deadline=deadline,
    )


def test_waves_are_placed_in_the_time_of_their_plan() -> None:
    found = wave_chart([wave(1, 100, 200, 4), wave(2, 200, 300, 1)], 150)
    first, second = found.bars
    assert (first.left, first.width, first.done) == (0, 50, 1)
    assert (second.left, second.width, second.done) == (50, 50, 0.25)
    assert found.now == 25


def test_a_wave_without_a_deadline_lasts_until_now_and_one_without_a_start_waits() -> None:
    found = wave_chart([wave(1, 100, None), wave(2, None, None)], 150)
    (bar,) = found.bars
    assert (bar.number, bar.left, bar.width, found.waiting) == (1, 0, 100, 1)
    assert wave_chart([wave(1, None, None)], 150) is None


@pytest.mark.behaviour("HP4")
def test_settings_are_on_a_logarithmic_axis_the_slowest_first() -> None:
    """The switch times of a fast and a slow setting are both readable (Figure 17)."""
    fast = SettingTimes(setting="sysctl", switches=3, p50_ms=10, p90_ms=100)
    slow = SettingTimes(setting="hugepages", switches=3, p50_ms=1000, p90_ms=10_000)
    found = setting_chart([fast, slow])
    first, second = found.bars
    assert (first.times, round(first.p50), round(first.p90)) == (slow, 67, 100)
    assert (second.p50, round(second.p90)) == (0.5, 33)
    assert [word for _, word in found.ticks] == ["10 ms", "100 ms", "1 s", "10 s"]
    assert setting_chart([]).bars == []


class Browser:
    """Keeps what was written to a browser. The browser leaves after `stays` writes."""

    def __init__(self, stays: int) -> None:
        self.stays, self.got = stays, list[bytes]()

    async def write(self, data: bytes) -> None:
        if len(self.got) >= self.stays:
            raise ConnectionResetError
        self.got.append(data)


async def test_a_log_is_sent_as_text_also_where_a_character_is_cut() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield "ü\n".encode()[:1]
        yield "ü\n".encode()[1:] + b"data: x\n\n"

    browser = Browser(9)
    await streams.send_log(browser, chunks(), lambda: None)
    texts = [msgspec.json.decode(d.removeprefix(b"data: ")) for d in browser.got]
    assert "".join(texts) == "ü\ndata: x\n\n"
    assert all(d.count(b"\n\n") == 1 for d in browser.got), "an event ends with an empty line"


async def test_a_browser_that_left_ends_the_stream_of_a_silent_task(monkeypatch) -> None:
    monkeypatch.setattr(streams, "TICK_S", 0.001)
    closed = asyncio.Event()

    async def silent() -> AsyncIterator[bytes]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            closed.set()

    browser = Browser(3)
    with pytest.raises(ConnectionResetError):
        await streams.send_log(browser, silent(), lambda: None)
    assert browser.got == [b": \n\n"] * 3
    await closed.wait()


async def test_streams_end_once_their_session_is_ended(monkeypatch) -> None:
    monkeypatch.setattr(streams, "TICK_S", 0.001)
    browser, sessions = Browser(99), BrowserSessions(lambda: 100.0)
    sessions.record_request("a" * 12, "user:ann")

    def revision() -> int:
        if len(browser.got) == 2:
            sessions.end("a" * 12, "user:ann", may_end_all=False)
        return 7

    with pytest.raises(SessionEnded, match="ended by user:ann"):
        await streams.send_changes(browser, revision, lambda: sessions.check("a" * 12, "user:ann"))
    assert browser.got == [b"data: 7\n\n"] * 3


@pytest.mark.behaviour("FE1")
def test_streams_keep_separate_phases_after_a_pause_of_the_loop() -> None:
    """If all browsers are notified in one turn of the loop, the turn is as long as all their
    writes."""

    class Noting:
        def __init__(self) -> None:
            self.at: list[float] = []

        async def write(self, _: bytes) -> None:
            self.at.append(asyncio.get_running_loop().time())

    async def main() -> tuple[float, float]:
        loop, early, late = asyncio.get_running_loop(), Noting(), Noting()
        assert isinstance(loop, VirtualLoop)
        begun = []
        for browser in (early, late):
            sending = streams.send_changes(browser, lambda: 1, lambda: None)
            begun.append(asyncio.create_task(sending))
            await asyncio.sleep(0.7)
        await asyncio.sleep(6)
        loop._virtual.now += 3.05
        await asyncio.sleep(6)
        for sending in begun:
            sending.cancel()
        return early.at[-1], late.at[-1]

    first, second = run(main())
    assert (second - first) % streams.TICK_S == pytest.approx(0.7)


def test_a_machine_is_unavailable_only_while_an_event_is_open() -> None:
    event = UnavailabilityEvent(event_id="1", kind=EventKind.MAINTENANCE, reason="fans", start=1.0)
    record = MachineRecord(
        machine="m",
        location=Location(datacenter="d", msb="m", rack="r"),
        machine_type="t",
        unavailability=(event,),
    )
    assert state_of(record, 0, True) == "unavailable"
    over = replace(record, unavailability=(replace(event, end=2.0),))
    assert state_of(over, 0, True) == "free"


@pytest.mark.behaviour("BUG-UX66")
def test_waves_of_a_cancelled_plan_are_not_announced_as_coming() -> None:
    """Formerly the page of a cancelled plan announced the start of its other waves."""
    begun, later = wave(1, 100, 200, 4), wave(2, None, None)
    assert wave_chart([begun, later], 150).waiting == 1
    assert wave_chart([begun, replace(later, state=WaveState.CANCELLED)], 150).waiting == 0
