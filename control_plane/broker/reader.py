"""Reads stored machines so that their common parts are in memory once.

A million machines have some 30,000 places and a few hundred kinds of hardware. A copy of both for
each machine would take four times the memory.
"""

from __future__ import annotations

from sys import intern
from typing import Any, TypedDict

import msgspec

from agent.api import Location, MachineFacts
from control_plane.api.machines import Hardware, MachineRecord
from control_plane.store import Entry
from control_plane.store.records import SCHEMAS, decode

_WORDS = ("machine_type", "cluster", "entitlement", "profile_wanted", "profile")
"""Fields with few different values."""
_TIMES = ("joined_at", "quarantined_until")


def _stored_machine() -> Any:
    """Return the type of a stored machine, with its place and hardware as text.

    A dictionary has only the stored fields. A struct has all fields, and copying their defaults
    takes longer than decoding.
    """
    kinds: dict[str, Any] = {f.name: f.type for f in msgspec.structs.fields(MachineRecord)}
    kinds |= {"location": msgspec.Raw, "hardware": msgspec.Raw}
    return TypedDict("StoredMachine", kinds, total=False)  # type: ignore[operator]


class MachineReader:
    """Decodes machines; equal places, hardware and words are the same objects."""

    def __init__(self) -> None:
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_stored_machine())
        self._locations: dict[bytes | Location, Location] = {}
        self._hardware: dict[bytes | Hardware, Hardware | None] = {}
        self._profiles: dict[tuple[str, ...], tuple[str, ...]] = {}

    def read(self, name: str, entry: Entry) -> MachineRecord:
        """Return a stored machine; an unreadable one raises the error of `records.decode`."""
        try:
            fields: dict[str, Any] = self._decoder.decode(entry.value)
            if fields["schema"] > SCHEMAS[MachineRecord]:
                return decode(entry.value, MachineRecord, entry.key)
            fields["machine"] = name
            text = bytes(fields["location"])
            fields["location"] = self._locations.get(text) or self._location(text)
            if "hardware" in fields:
                text = bytes(fields["hardware"])
                fields["hardware"] = self._hardware.get(text) or self._hardware_of(text)
            for word in _WORDS:
                if word in fields:
                    fields[word] = intern(fields[word])
            for time in _TIMES:
                if not fields.get(time, True):
                    del fields[time]  # the default is one object for all
            self._share_profiles(fields.get("facts"))
            return MachineRecord(**fields)
        except (msgspec.DecodeError, KeyError, TypeError):  # damaged, or a field is missing
            return decode(entry.value, MachineRecord, entry.key)

    def shared(self, record: MachineRecord) -> MachineRecord:
        """Return a new record that shares the parts of earlier ones."""
        location = self._locations.setdefault(record.location, record.location)
        hardware = record.hardware
        if hardware is not None:
            hardware = self._hardware.setdefault(hardware, hardware)
        self._share_profiles(record.facts)
        return msgspec.structs.replace(
            record,
            location=location,
            hardware=hardware,
            **{word: intern(getattr(record, word)) for word in _WORDS},
        )

    def _share_profiles(self, facts: MachineFacts | None) -> None:
        if facts is not None:
            shared = self._profiles.setdefault(facts.profiles, facts.profiles)
            msgspec.structs.force_setattr(facts, "profiles", shared)

    def forget_text(self) -> None:
        """Drop the caches that help only while all machines are read."""
        self._locations = {v: v for v in self._locations.values()}
        self._hardware = {v: v for v in self._hardware.values() if v is not None}

    def _location(self, text: bytes) -> Location:
        value = msgspec.json.decode(text, type=Location)
        known = self._locations[text] = self._locations.setdefault(value, value)
        return known

    def _hardware_of(self, text: bytes) -> Hardware | None:
        value = msgspec.json.decode(text, type=Hardware | None)
        known = value if value is None else self._hardware.setdefault(value, value)
        self._hardware[text] = known
        return known
