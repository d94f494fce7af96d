"""The bus client of libsystemd: a waiting thread blocks no other, and values arrive unchanged."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pystemd.dbusexc import DBusBaseError

from agent.machine.bus import CLOSE, Bus, Message, _append, _BusReader, _library, open_bus
from agent.machine.unit_properties import encode

NAMES = b"org.example", b"/org/example", b"org.example.A", b"Ask"

NUMBERS = (255, -1, 9, -5, 7, -9, 2**64 - 1, 1.5)


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Yield a system bus that accepts connections and never answers."""
    path = tmp_path / "bus"
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={path}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield listener


@pytest.mark.behaviour("BUG-AG2")
def test_other_threads_run_while_one_waits_for_an_answer(silent: socket.socket) -> None:
    """pystemd keeps the interpreter's lock while it waits, so the whole agent stopped."""
    failed = list[DBusBaseError]()
    bus = open_bus()
    near, _ = silent.accept()

    def ask() -> None:
        try:
            bus.call_method(*NAMES, [])
        except DBusBaseError as e:
            failed.append(e)

    caller = threading.Thread(target=ask)
    with near:
        caller.start()
        assert near.recv(64)  # the connection exists, and waits
        caller.join(0.05)
        assert caller.is_alive()
    caller.join(60)

    assert not caller.is_alive()
    assert len(failed) == 1
    bus.close()


def test_a_missing_bus_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/none")
    with pytest.raises(DBusBaseError):
        open_bus()


def test_a_bus_without_messages_returns_none(silent: socket.socket) -> None:
    bus = open_bus()
    assert bus.process() is None
    assert os.fstat(bus.get_fd())
    nothing = Message()
    assert not nothing.is_signal(b"a.b", b"C")
    assert nothing.get_member() == b""
    assert nothing.body is None
    bus.close()


def again(bus: Bus, args: list[tuple[int, object]]) -> object:
    """Return the values that the other side reads from a message with these values."""
    held, message = _library().held, Message()
    held.sd_bus_message_new_method_call(bus._bus, ctypes.byref(message.pointer), *NAMES)
    _append(held, message.pointer, args)
    assert held.sd_bus_message_seal(message.pointer, ctypes.c_uint64(1), ctypes.c_uint64(0)) >= 0
    assert held.sd_bus_message_rewind(message.pointer, 1) >= 0
    return _BusReader(message.pointer).values()


def test_values_are_decoded_as_they_were_encoded(silent: socket.socket) -> None:
    bus = open_bus()
    number = [(ord(k), v) for k, v in zip("ynqiuxtd", NUMBERS, strict=True)]
    texts = [(ord("s"), "ä".encode()), (ord("o"), b"/a"), (ord("g"), b"as"), (ord("b"), True)]
    rows = [(ord("a"), b"(su)")]
    for name in (b"a", b"b"):
        rows += [(ord("r"), b"su"), (ord("s"), name), (ord("u"), 4), (CLOSE, None)]
    pair = [(ord("a"), b"{sv}"), (ord("e"), b"sv"), (ord("s"), b"k"), (ord("v"), b"ay")]
    pair += [(ord("a"), b"y"), (ord("y"), 1), (ord("y"), 2), *[(CLOSE, None)] * 4]
    nested = [(ord("a"), b"(bas)"), (ord("r"), b"bas"), (ord("b"), False), (ord("a"), b"s")]
    nested += [(ord("s"), b"x"), *[(CLOSE, None)] * 3]

    assert again(bus, number) == list(NUMBERS)
    assert again(bus, texts) == ["ä".encode(), b"/a", b"as", True]
    assert again(bus, [*rows, (CLOSE, None)]) == [[(b"a", 4), (b"b", 4)]]
    assert again(bus, [(ord("a"), b"(su)"), (CLOSE, None)]) == [[]]
    assert again(bus, pair) == [{b"k": b"\1\2"}]
    assert again(bus, nested) == [[(False, [b"x"])]]
    assert again(bus, []) == []
    bus.close()


def test_properties_of_a_unit_can_be_encoded(silent: socket.socket) -> None:
    bus = open_bus()
    properties = {"ExecStart": [["/bin/sleep", "1"]], "MemoryMax": None, "Description": "a"}
    (found,) = again(bus, encode(properties))  # type: ignore[misc]
    assert dict(found)[b"MemoryMax"] == 2**64 - 1
    assert dict(found)[b"Description"] == b"a"
    assert dict(found)[b"ExecStartEx"][0][:2] == (b"/bin/sleep", [b"/bin/sleep", b"1"])
    bus.close()


def test_more_values_than_one_call_takes_arrive_all(silent: socket.socket) -> None:
    bus = open_bus()
    words = [f"N{i}={i}" for i in range(2000)]
    (found,) = again(bus, encode({"Environment": words, "CPUWeight": 5}))  # type: ignore[misc]
    assert dict(found) == {b"Environment": [w.encode() for w in words], b"CPUWeight": 5}
    bus.close()


def test_a_value_that_does_not_fit_is_refused(silent: socket.socket) -> None:
    bus = open_bus()
    with pytest.raises(DBusBaseError):
        bus.call_method(*NAMES, [(CLOSE, None)])
    bus.close()
