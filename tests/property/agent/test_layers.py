"""The layer made from the difference of two trees turns the first tree into the second."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oci import compressed, difference, sha, tree_state

from agent.machine.layer import apply

ROOT = os.geteuid() == 0
NAMES = st.sampled_from(["a", "b", "c", "d", "ä ö", "-x"])
OWNERS = st.sampled_from([(0, 0), (0, 7), (1000, 1000)]) if ROOT else st.just((-1, -1))
FILES = st.tuples(
    st.just("file"),
    st.binary(max_size=40),
    st.sampled_from([0o644, 0o600, 0o755]),
    OWNERS,
    st.dictionaries(st.sampled_from(["user.a", "user.b"]), st.binary(max_size=8), max_size=2),
    st.integers(1, 10**18),
)
LINKS = st.tuples(st.just("link"), st.sampled_from(["a", "../b", "/etc", "nowhere"]))
HARD = st.tuples(st.just("hard"), st.integers(0, 100))
PIPES = st.tuples(st.just("pipe"), st.sampled_from([0o600, 0o644]))
LEAVES = st.one_of(FILES, FILES, LINKS, HARD, PIPES)
TREES = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=4),
    lambda inner: st.dictionaries(NAMES, LEAVES | inner, max_size=4),
    max_leaves=12,
)


def _build(top: Path, tree: dict[str, object], files: list[Path]) -> None:
    top.mkdir(exist_ok=True)
    for name, what in tree.items():
        path = top / name
        if isinstance(what, dict):
            _build(path, what, files)
            continue
        assert isinstance(what, tuple)
        match what[0]:
            case "file":
                _, data, mode, owner, attributes, at = what
                path.write_bytes(data)
                os.chown(path, *owner)
                for key, value in attributes.items():
                    os.setxattr(path, key, value)
                path.chmod(mode)
                os.utime(path, ns=(at, at))
                files.append(path)
            case "link":
                path.symlink_to(what[1])
            case "hard" if files:
                os.link(files[what[1] % len(files)], path)
            case "pipe":
                os.mkfifo(path, what[1])
                path.chmod(what[1])


@pytest.mark.behaviour("AG3")
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(TREES, TREES, st.sampled_from(["tar", "gzip"]))
def test_a_difference_applied_to_where_it_came_from_gives_where_it_leads(
    before: dict[str, object], after: dict[str, object], how: str
) -> None:
    """Covers files, folders, both kinds of links, pipes, modes, owners, times and attributes."""
    with tempfile.TemporaryDirectory() as base:
        old, new = Path(base) / "old", Path(base) / "new"
        _build(old, before, [])
        _build(new, after, [])
        data = difference(old, new)
        (Path(base) / "blob").write_bytes(blob := compressed(data, how))
        shutil.rmtree(Path(base) / "tree", ignore_errors=True)
        _build(tree := Path(base) / "tree", before, [])

        apply(base, "blob", how, sha(blob), sha(data), str(tree), owners=ROOT)

        assert tree_state(tree) == tree_state(new)
