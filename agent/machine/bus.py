"""D-Bus client of the system bus (libsystemd, sd-bus(3)) that releases the GIL while it waits.

pystemd uses the same library but holds the interpreter's lock while it waits, so one slow answer
of PID 1 blocks the whole program. Here the lock is released only in calls that wait. Other calls
hold it, because releasing it would switch threads after each call (docs/adr/0116). One call puts
all values into a message (sd_bus_message_append(3)): the unit of a task has four hundred pieces.

Values are represented as in pystemd: text is bytes, an array is a list, a structure a tuple. Only
an array of bytes is bytes.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterable
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

from pystemd.dbusexc import DBusError

Token = tuple[int, object]
CLOSE = -1
_CONTAINERS = frozenset(b"arev")
_NUMBERS: dict[int, Any] = {
    ord("y"): ctypes.c_uint8,
    ord("b"): c_int,
    ord("n"): ctypes.c_int16,
    ord("q"): ctypes.c_uint16,
    ord("i"): ctypes.c_int32,
    ord("u"): ctypes.c_uint32,
    ord("x"): ctypes.c_int64,
    ord("t"): c_uint64,
    ord("d"): ctypes.c_double,
    ord("h"): c_int,
}
_LONG = {ord("u"), ord("x"), ord("t"), ord("d")}
"""Types that ctypes cannot pass as plain integers to a C function with variable arguments."""
_MOST_VALUES = 1000
"""Values in one call; ctypes passes at most 1024 arguments."""
_TEXTS = frozenset(b"sog")
_PLAIN = _TEXTS | _NUMBERS.keys() - {ord("b")}


class _Error(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("message", c_char_p), ("need_free", c_int))


class _Library(NamedTuple):
    """`held` keeps the interpreter's lock, for calls that never wait; `free` releases it."""

    held: Any
    free: Any


@cache
def _library() -> _Library:
    held, free = ctypes.PyDLL("libsystemd.so.0"), ctypes.CDLL("libsystemd.so.0")
    pointer, text = c_void_p, c_char_p
    shapes: dict[str, tuple[Any, ...]] = {
        "sd_bus_process": (pointer, POINTER(pointer)),
        "sd_bus_get_fd": (pointer,),
        "sd_bus_message_new_method_call": (pointer, POINTER(pointer), text, text, text, text),
        "sd_bus_message_append_basic": (pointer, c_char, pointer),
        "sd_bus_message_open_container": (pointer, c_char, text),
        "sd_bus_message_close_container": (pointer,),
        "sd_bus_message_peek_type": (pointer, POINTER(c_char), POINTER(text)),
        "sd_bus_message_enter_container": (pointer, c_char, text),
        "sd_bus_message_exit_container": (pointer,),
        "sd_bus_message_read_basic": (pointer, c_char, pointer),
        "sd_bus_message_read_array": (pointer, c_char, POINTER(pointer), POINTER(c_size_t)),
        "sd_bus_message_is_signal": (pointer, text, text),
        "sd_bus_message_get_member": (pointer,),
    }
    for name, shape in shapes.items():
        getattr(held, name).argtypes = shape
    held.sd_bus_message_get_path.argtypes, held.sd_bus_message_get_path.restype = (pointer,), text
    held.sd_bus_message_get_member.restype = text
    held.sd_bus_message_unref.argtypes, held.sd_bus_message_unref.restype = (pointer,), pointer
    held.sd_bus_error_free.argtypes, held.sd_bus_error_free.restype = (POINTER(_Error),), None
    free.sd_bus_open_system.argtypes = (POINTER(pointer),)
    free.sd_bus_call.argtypes = (pointer, pointer, c_uint64, POINTER(_Error), POINTER(pointer))
    free.sd_bus_close.argtypes, free.sd_bus_close.restype = (pointer,), None
    free.sd_bus_unref.argtypes, free.sd_bus_unref.restype = (pointer,), pointer
    return _Library(held, free)


def open_bus() -> Bus:
    """Return a new connection to the system bus. Raises `DBusBaseError`."""
    found = c_void_p()
    _check(_library().free.sd_bus_open_system(byref(found)), "cannot open the system bus")
    return Bus(found)


class Bus:
    """A connection. One thread at a time may use it; other threads run while it waits."""

    def __init__(self, bus: c_void_p) -> None:
        """Take ownership of the library's connection."""
        self._bus = bus

    def close(self) -> None:
        """Close the connection; must not be called twice."""
        free = _library().free
        free.sd_bus_close(self._bus)
        free.sd_bus_unref(self._bus)

    def get_fd(self) -> int:
        """Return the descriptor that becomes readable when there is something to `process`."""
        return _check(_library().held.sd_bus_get_fd(self._bus), "the bus has no descriptor")

    def process(self) -> Message | None:
        """Process one event of the bus and return its message, which may be empty; None if there
        was no event.
        """
        message = Message()
        code = _library().held.sd_bus_process(self._bus, byref(message.pointer))
        return message if _check(code, "cannot read from the bus") else None

    def call_method(
        self,
        destination: bytes,
        path: bytes,
        interface: bytes,
        method: bytes,
        args: Iterable[Token],
    ) -> Message:
        """Return the decoded answer to a call. Raises `DBusBaseError`."""
        held, free = _library()
        call, answer, error = Message(), Message(), _Error()
        names = destination, path, interface, method
        code = held.sd_bus_message_new_method_call(self._bus, byref(call.pointer), *names)
        _check(code, "cannot make a call")
        _append(held, call.pointer, args)
        try:
            sent = self._bus, call.pointer, 0, byref(error), byref(answer.pointer)
            code = free.sd_bus_call(*sent)
            if code < 0:
                raise DBusError(code, error.name, error.message)
        finally:
            held.sd_bus_error_free(byref(error))
        answer.process_reply()
        return answer


class Message:
    """A message from the bus; empty if there was none."""

    def __init__(self) -> None:
        self.pointer = c_void_p()
        self.body: Any = None

    def __del__(self) -> None:
        """Release the memory."""
        if self.pointer:
            _library().held.sd_bus_message_unref(self.pointer)

    def is_signal(self, interface: bytes, member: bytes) -> bool:
        """Return whether it is this signal."""
        if not self.pointer:
            return False
        return bool(_library().held.sd_bus_message_is_signal(self.pointer, interface, member) > 0)

    def get_member(self) -> bytes:
        """Return the name of the call or signal; empty for an answer."""
        found: bytes | None = None
        if self.pointer:
            found = _library().held.sd_bus_message_get_member(self.pointer)
        return found or b""

    def get_path(self) -> bytes:
        """Return the path of the object that sent the signal."""
        found: bytes | None = _library().held.sd_bus_message_get_path(self.pointer)
        return found or b""

    def process_reply(self) -> None:
        """Decode the message into `body`: one value, a list of several, or None."""
        values = _BusReader(self.pointer).values()
        self.body = values if len(values) > 1 else values[0] if values else None


class _BusReader:
    """Decodes a message."""

    def __init__(self, message: c_void_p) -> None:
        self._message, self._held = message, _library().held
        self._kind, self._inside = c_char(), c_char_p()

    def values(self) -> list[Any]:
        """Return everything up to the end of the message, or of the container it is in."""
        decoded: list[Any] = []
        peek, kind, inside = self._held.sd_bus_message_peek_type, self._kind, self._inside
        while _check(peek(self._message, byref(kind), byref(inside)), "cannot read a message"):
            code = kind.value[0]
            if code in _CONTAINERS:
                decoded.append(self._container(code, inside.value or b""))
            else:
                decoded.append(self._basic(code))
        return decoded

    def _basic(self, code: int) -> Any:
        place = c_char_p() if code in _TEXTS else _NUMBERS[code]()
        read = self._held.sd_bus_message_read_basic(self._message, code, byref(place))
        _check(read, "cannot read a value")
        return bool(place.value) if code == ord("b") else place.value

    def _container(self, code: int, inside: bytes) -> Any:
        held, message = self._held, self._message
        if code == ord("a") and inside == b"y":
            return self._bytes()
        _check(held.sd_bus_message_enter_container(message, code, inside), "cannot read a message")
        fields = inside[1:-1]
        if code == ord("a") and inside[:1] == b"(" and set(fields) <= _PLAIN:
            decoded: Any = self._rows(inside, fields)
        else:
            decoded = self.values()
        _check(held.sd_bus_message_exit_container(message), "cannot read a message")
        if code == ord("v"):
            return decoded[0]
        if code == ord("r") or code == ord("e"):
            return tuple(decoded)
        return dict(decoded) if inside[:1] == b"{" else decoded

    def _bytes(self) -> bytes:
        place, size = c_void_p(), c_size_t()
        read = self._held.sd_bus_message_read_array
        _check(read(self._message, ord("y"), byref(place), byref(size)), "cannot read bytes")
        return ctypes.string_at(place, size.value) if size.value else b""

    def _rows(self, inside: bytes, fields: bytes) -> list[tuple[Any, ...]]:
        """Return structures of plain values, read with one call each instead of two per value."""
        places = [c_char_p() if kind in _TEXTS else _NUMBERS[kind]() for kind in fields]
        into = [byref(place) for place in places]
        read, rows = self._held.sd_bus_message_read, list[tuple[Any, ...]]()
        while _check(read(self._message, c_char_p(inside), *into), "cannot read a structure"):
            rows.append(tuple([place.value for place in places]))
        return rows


def _append(held: Any, message: c_void_p, tokens: Iterable[Token]) -> None:
    """Put values into a message with one call, or one by one if there are too many."""
    tokens = list(tokens)
    types, values = _signature_and_values(tokens)
    if len(values) > _MOST_VALUES:
        for kind, value in tokens:
            _append_piece(held, message, kind, value)
        return
    code = held.sd_bus_message_append(message, types, *values)
    _check(code, f"cannot put {types!r} into a message")


def _signature_and_values(tokens: Iterable[Token]) -> tuple[bytes, list[Any]]:
    """Return the arguments of sd_bus_message_append(3): the type signature and the values."""
    types, values = bytearray(), list[Any]()
    inside: list[list[int] | None] = []
    """For each open container: the position of its number of elements, and the number so far;
    None for one without a number."""
    for kind, value in tokens:
        if kind == CLOSE:
            if not inside:
                raise DBusError(-errno.EINVAL, None, "a container is closed that was not opened")
            if (array := inside.pop()) is not None:
                values[array[0]] = array[1]
            continue
        if not inside:
            types += _type(kind, value)
        elif (array := inside[-1]) is not None:
            array[1] += 1
        if kind == ord("a"):
            inside.append([len(values), 0])
            values.append(0)
        elif kind in _CONTAINERS:
            inside.append(None)
            if kind == ord("v"):
                values.append(value)
        else:
            values.append(_NUMBERS[kind](value) if kind in _LONG else value)
    return bytes(types), values


def _type(kind: int, contents: Any) -> bytes:
    """Return the type of a value, including the contents of an array or a structure."""
    if kind == ord("a"):
        return b"a" + bytes(contents)
    return b"(%s)" % contents if kind == ord("r") else bytes([kind])


def _append_piece(held: Any, message: c_void_p, kind: int, value: Any) -> None:
    if kind == CLOSE:
        code = held.sd_bus_message_close_container(message)
    elif kind in _CONTAINERS:
        code = held.sd_bus_message_open_container(message, kind, value)
    elif kind in _TEXTS:
        code = held.sd_bus_message_append_basic(message, kind, c_char_p(value))
    else:
        code = held.sd_bus_message_append_basic(message, kind, byref(_NUMBERS[kind](value)))
    _check(code, f"cannot put {value!r} into a message")


def _check(code: int, what: str) -> int:
    """Return the result of a library call, or raise `DBusError` if it is negative."""
    if code < 0:
        raise DBusError(code, None, what)
    return code
