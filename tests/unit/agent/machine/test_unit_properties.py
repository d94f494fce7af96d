"""Python values become D-Bus tokens; an invalid value is refused with its property's name."""

from __future__ import annotations

import pytest

from agent.machine.unit_properties import CLOSE, SIGNATURES, UNLIMITED, encode, split_signature
from wire.errors import InvalidInput


def on_the_wire(name: str, value: object) -> list[object]:
    """Return the values of a property's tokens, without the tokens of containers."""
    tokens = encode({name: value})
    assert tokens[0] == (ord("a"), b"(sv)")
    assert tokens[-1] == CLOSE
    return [item for kind, item in tokens if kind not in (-1, *map(ord, "a(rv"))]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("Description", "web", [b"web"]),
        ("ProtectHome", True, [b"yes"]),
        ("PrivateTmp", False, [False]),
        ("CPUWeight", 100, [100]),
        ("MemoryMax", None, [UNLIMITED]),
        ("UMask", 0o077, [0o077]),
        ("Nice", -5, [-5]),
        ("Environment", ["A=1", "B=x y"], [b"A=1", b"B=x y"]),
        ("CapabilityBoundingSet", 0, [0]),
        ("CapabilityBoundingSet", ("CAP_CHOWN", "cap_kill"), [1 << 0 | 1 << 5]),
        ("AmbientCapabilities", ["CAP_NET_BIND_SERVICE", "CAP_BPF"], [1 << 10 | 1 << 39]),
        ("RestrictNamespaces", True, [0]),
        ("RestrictNamespaces", False, [0x7E020080]),
        ("AllowedCPUs", [0, 2, 9], [0b101, 0b10]),
        ("AllowedCPUs", [], []),
        ("IPAddressDeny", ["169.254.0.0/16"], [2, 169, 254, 0, 0, 16]),
        ("IPAddressDeny", ["fe80::/10"], [10, 0xFE, 0x80, *[0] * 14, 10]),
        ("IPAddressDeny", ["any"], [2, 0, 0, 0, 0, 0, 10, *[0] * 16, 0]),
        ("DeviceAllow", ["/dev/null rw", "/dev/kvm"], [b"/dev/null", b"rw", b"/dev/kvm", b"rw"]),
        ("TemporaryFileSystem", ["/a:ro", "/b"], [b"/a", b"ro", b"/b", b""]),
        ("BindReadOnlyPaths", ["/a:/b"], [b"/a", b"/b", False, 16384]),
        ("BindPaths", ["-/c"], [b"/c", b"/c", True, 16384]),
        ("SetCredential", {"key": b"\x00\xff"}, [b"key", 0, 255]),
        ("IOReadBandwidthMax", {"/dev/vda": 1000}, [b"/dev/vda", 1000]),
    ],
)  # fmt: skip
def test_a_value_is_translated(name: str, value: object, expected: list[object]) -> None:
    assert on_the_wire(name, value) == [name.encode(), *expected]


def test_commands_are_sent_so_that_no_variable_is_replaced() -> None:
    argv = ["/bin/echo", "$HOME", "a b"]

    values = on_the_wire("ExecStart", [argv, ["/bin/true"]])

    assert values == [
        *[b"ExecStartEx", b"/bin/echo", b"/bin/echo", b"$HOME", b"a b", b"no-env-expand"],
        *[b"/bin/true", b"/bin/true", b"no-env-expand"],
    ]


def test_a_system_call_filter_keeps_the_order_of_its_groups() -> None:
    name = b"SystemCallFilter"

    values = on_the_wire("SystemCallFilter", ["@system-service", "~@privileged", "~@raw", "@chown"])

    assert values == [
        *[name, True, b"@system-service"],
        *[name, False, b"@privileged", b"@raw"],
        *[name, True, b"@chown"],
    ]
    assert on_the_wire("RestrictAddressFamilies", ()) == [b"RestrictAddressFamilies", True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CPUWait", 1),
        ("CPUWeight", "high"),
        ("CPUWeight", True),
        ("CPUWeight", -1),
        ("CPUWeight", 2**64),
        ("Description", 7),
        ("Description", "a\0b"),
        ("PrivateTmp", 1),
        ("PrivateTmp", "yes"),
        ("Environment", "A=1"),
        ("Environment", [1]),
        ("ExecStart", ["/bin/true"]),
        ("ExecStart", [[]]),
        ("ExecStart", [["/bin/echo", "a\0b"]]),
        ("ExecStart", [["/bin/echo", "\udc80"]]),
        ("CapabilityBoundingSet", ["CAP_FLY"]),
        ("IPAddressDeny", ["169.254.0.1/16"]),
        ("AllowedCPUs", "0-3"),
        ("AllowedCPUs", [-1]),
        ("SetCredential", ["key"]),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_name_and_value(name: str, value: object) -> None:
    with pytest.raises(InvalidInput) as refused:
        encode({"Type": "exec", name: value})

    assert str(refused.value).startswith(f"cannot set {name} to {value!r}: ")


@pytest.mark.behaviour("BUG-AG49")
@pytest.mark.parametrize("text", ["/srv\nExecStopPost=+/bin/sh", "/srv\r", "/\x1b[0m", "/a\x7f"])
@pytest.mark.parametrize("name", ["WorkingDirectory", "ExecSearchPath", "BindPaths", "DeviceAllow"])
def test_no_text_can_begin_another_line_of_the_units_file(name: str, text: str) -> None:
    """systemd reads the file of a unit again at a `daemon-reload`.

    A property after a newline was then in force, for instance a command that runs as root on the
    host.
    """
    with pytest.raises(InvalidInput, match="a control character is not allowed"):
        encode({name: text if SIGNATURES[name] == "s" else [text]})


def test_properties_that_systemd_escapes_may_have_newlines() -> None:
    assert on_the_wire("Environment", ["A=1\n2"]) == [b"Environment", b"A=1\n2"]
    assert b"a\nb" in on_the_wire("ExecStart", [["/bin/echo", "a\nb"]])


def test_the_table_only_has_types_that_can_be_encoded() -> None:
    letters = {letter for kind in SIGNATURES.values() for letter in kind}

    assert letters <= set("a(sbtuiy)")


@pytest.mark.parametrize(
    ("signature", "parts"),
    [("", []), ("s", ["s"]), ("sa(ss)b", ["s", "a(ss)", "b"]), ("aayas", ["aay", "as"])],
)
def test_a_signature_has_complete_types(signature: str, parts: list[str]) -> None:
    assert list(split_signature(signature)) == parts
