"""The kernel command line, split into sidekick's arguments and the host's own. Pure.

Arguments form groups. A group is one value: a key (`isolcpus=`), or keys that only have a meaning
together and in order (`hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=200`). A group of sidekick
replaces the host's own group, which is recorded and restored later. All other arguments stay.
Source of the syntax: Linux, Documentation/admin-guide/kernel-parameters.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from sidekick.record import OwnedGroup

MAX_LINE = 2047
"""Characters that x86 keeps (COMMAND_LINE_SIZE 2048, with the final NUL)."""
OF_HUGEPAGES = frozenset({"hugepages", "hugepagesz", "default_hugepagesz"})
"""A size applies to the count after it: the three are one value."""
HUGEPAGES = "hugepages"
VERSION = "kernel version"
"""The group that has no argument: which of the installed kernels boots."""
GUARD = "panic"
GUARD_ARGUMENT = "panic=30"
"""Added to every line of sidekick unless the host's own line has the key. A kernel that panics, or
that finds no root file system, then restarts after 30 s, with the host's own line."""
_LOADER_KEYS = frozenset({"BOOT_IMAGE", "initrd"})
"""Added by boot loaders for one boot; no part of the line to stage."""

Groups = Mapping[str, tuple[str, ...]]


def key_of(argument: str) -> str:
    """Return the key; to the kernel, dashes and underscores in it are the same."""
    return argument.partition("=")[0].replace("-", "_")


def group_of(argument: str) -> str:
    """Return the group that an argument is of."""
    key = key_of(argument)
    return HUGEPAGES if key in OF_HUGEPAGES else key


def split(line: str) -> list[str]:
    """Return the arguments as the kernel separates them: not within double quotes."""
    return re.findall(r'(?:[^\s"]|"[^"]*(?:"|$))+', line)


def tokens_of(line: str) -> tuple[list[str], list[str]]:
    """Return the kernel's arguments, and from `--` on those for init."""
    tokens = [t for t in split(line) if key_of(t) not in _LOADER_KEYS]
    end = tokens.index("--") if "--" in tokens else len(tokens)
    return tokens[:end], tokens[end:]


def group_in(line: str, group: str) -> tuple[str, ...]:
    """Return the arguments of a line that belong to a group, in order."""
    return tuple(t for t in tokens_of(line)[0] if group_of(t) == group)


def in_force(line: str, group: str, arguments: Sequence[str]) -> bool:
    """Return whether a kernel started with this line does what the arguments say.

    If a key occurs twice the last one counts; pairs add up.
    """
    found = group_in(line, group)
    if group == HUGEPAGES:
        return found == tuple(arguments)
    return found[-len(arguments) :] == tuple(arguments) if arguments else not found


def compose(own: str, groups: Groups) -> str:
    """Return the host's own line with these groups instead of its own ones."""
    tokens, inits = tokens_of(own)
    rest = {group: arguments for group, arguments in groups.items() if group != VERSION}
    out: list[str] = []
    placed: set[str] = set()
    for token in tokens:
        group = group_of(token)
        if group not in rest:
            out.append(token)
        elif group not in placed:
            placed.add(group)
            out += rest[group]
    for group, arguments in rest.items():
        out += arguments if group not in placed else ()
    return " ".join(out + inits)


def owned_groups(own: str, groups: Groups, late: Iterable[str] = ()) -> tuple[OwnedGroup, ...]:
    """Return the groups that sidekick owns on the composed line: those that the host lacks."""
    waiting = set(late)
    return tuple(
        OwnedGroup(
            group=group,
            arguments=arguments,
            displaced=group_in(own, group),
            late=group in waiting,
        )
        for group, arguments in groups.items()
        if group == VERSION or group_in(own, group) != arguments
    )


def without_owned(line: str, owned: Sequence[OwnedGroup]) -> str:
    """Return the host's own line: a running one without our groups, with what they replaced."""
    tokens, inits = tokens_of(line)
    for each in owned:
        if each.group == VERSION or not set(each.arguments) <= set(tokens):
            continue
        place = tokens.index(each.arguments[0])
        ours = set(each.arguments)
        kept = [t for t in tokens if t not in ours]
        # a token of ours that the host's line also had is among the displaced
        back = [t for t in each.displaced if t not in kept]
        place = len([t for t in tokens[:place] if t not in ours])
        tokens = kept[:place] + back + kept[place:]
    return " ".join(tokens + inits)


def leftovers(line: str, owned: Sequence[OwnedGroup], groups: Groups) -> list[str]:
    """Return our arguments in force that no profile wants and that only a boot undoes."""
    tokens, _ = tokens_of(line)
    return [
        argument
        for each in owned
        if not each.late and each.group not in (VERSION, GUARD)
        if set(each.arguments) <= set(tokens) and groups.get(each.group) != each.arguments
        for argument in each.arguments
    ]
