"""Labels of machines: words by which operators group them, and that requirements can test."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from control_plane.api.machines import MachineRecord
from control_plane.api.policy import LABEL_NAME, LABEL_VALUE, MAX_LABELS
from wire.errors import InvalidInput

_NAME, _VALUE = re.compile(LABEL_NAME), re.compile(LABEL_VALUE)


def read_labels(value: object) -> dict[str, str]:
    """Return the labels of a list's cell, `disk=nvme zone=a` or an object; else `ValueError`."""
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.replace(";", " ").split()]
        if bare := [name for name, equals, _ in pairs if not equals]:
            raise ValueError(f"must be NAME=VALUE with spaces between; {bare[0]!r} has no value")
        names = [name for name, _, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError("must have each name once")
        found: Mapping[object, object] = {name: text for name, _, text in pairs}
    elif isinstance(value, dict):
        found = value
    else:
        raise ValueError("must be NAME=VALUE with spaces between, or an object")
    labels: dict[str, str] = {}
    for name, text in found.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"must have names of a-z, 0-9, - _ and dots; {name!r} does not")
        if not isinstance(text, str) or not _VALUE.fullmatch(text):
            raise ValueError(f"must have values of A-Z, a-z, 0-9 and -._:+; {text!r} does not")
        labels[name] = text
    if len(labels) > MAX_LABELS:
        raise ValueError(f"must be at most {MAX_LABELS} labels")
    return labels


def relabelled(
    record: MachineRecord, labels: Mapping[str, str], without: Collection[str] = ()
) -> MachineRecord:
    """Return a machine with `labels` set and `without` removed; the same object if nothing changes.

    Raises `InvalidInput` if the machine would have too many.
    """
    known = record.labels or {}
    wanted = {name: text for name, text in known.items() if name not in without} | dict(labels)
    if len(wanted) > MAX_LABELS:
        raise InvalidInput(
            f"machine {record.machine!r} would have {len(wanted)} labels, more than {MAX_LABELS}",
            hint="remove some: twinectl machine label --remove NAME",
        )
    return record if wanted == known else replace(record, labels=wanted or None)
