"""Any text is parsed or refused with a message. Terms round-trip, and verdicts agree with sets."""

from hypothesis import given
from hypothesis import strategies as st

from agent.api import Location
from control_plane.api.machines import Hardware, MachineRecord
from control_plane.api.requirement_parser import MAX_DEPTH, parse, parse_with_errors
from control_plane.api.requirements import (
    NUMBERS,
    TEXTS,
    AllOf,
    AnyOf,
    Because,
    Compare,
    Exists,
    In,
    Not,
    text_of,
)
from control_plane.broker.core.matching import Listed, holds, may_hold

WORDS = st.text("ab1 ().,-_\"\\=<>'", min_size=1, max_size=6)
LABELS = st.sampled_from(["label.a", "label.b-2", "label.x.y_z"])
NAMES = st.sampled_from(sorted(TEXTS)) | LABELS
SIZES = {"memory", "disk"}
COUNTS = st.sampled_from([0.0, 1.0, 2.5, 8.0, 64.0])
SIGNS = st.sampled_from(["=", "<", "<=", ">", ">="])
SOME = st.frozensets(WORDS, min_size=1, max_size=3)
LEAVES = (
    st.builds(In, NAMES, SOME)
    | st.builds(Compare, st.sampled_from(sorted({*NUMBERS} - SIZES)), SIGNS, COUNTS)
    | st.builds(Compare, st.sampled_from(sorted(SIZES)), SIGNS, st.integers(0, 1 << 60).map(float))
    | st.builds(Compare, LABELS, st.sampled_from(["<", ">="]), COUNTS)
    | st.builds(Exists, NAMES | st.sampled_from(sorted(NUMBERS)))
)
TERMS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(Not, inner)
        | st.builds(AllOf, st.lists(inner, min_size=2, max_size=3).map(tuple))
        | st.builds(AnyOf, st.lists(inner, min_size=2, max_size=3).map(tuple))
    ),
    max_leaves=8,
)
PIECES = ["rack", "gpus", "label.a", "=", "!=", "<", "in", "not", "and", "or", "(", ")", ",", '"']
TEXTS_OF_PEOPLE = st.text(max_size=60) | st.lists(
    st.sampled_from([*PIECES, "exists", "r1", "8", "64GiB", "state", "~"]), max_size=30
).map(" ".join)


def depth(term: object) -> int:
    match term:
        case Not(inner) | Because(inner):
            return 1 + depth(inner)
        case AllOf(terms) | AnyOf(terms):
            return 1 + max(map(depth, terms))
    return 1


@given(TERMS | st.builds(Because, TERMS, WORDS.filter(str.strip)))
def test_a_term_is_read_back_from_its_text(term):
    if depth(term) < MAX_DEPTH and len(text_of(term)) < 2000:
        assert parse(text_of(term)) == term


@given(TEXTS_OF_PEOPLE)
def test_any_text_is_read_or_refused_with_a_message(text):
    term, errors = parse_with_errors(text)
    assert (term is None) is bool(errors) or errors
    if not errors:
        assert term is not None
        assert parse(text_of(term)) == term


def machine(number: int) -> Listed:
    """Return one of 24 machines that differ in a word, a number and a label."""
    word, count, label = number % 2, number // 2 % 3, number // 6
    return Listed.of(
        MachineRecord(
            machine=f"m{number}",
            location=Location(msb=("a", "b")[word]),
            machine_type="small",
            hardware=Hardware(gpus=(0, 1, 8)[count]),
            labels=[None, {"a": "1"}, {"a": "b"}, {"a": "8", "b-2": "a"}][label],
        )
    )


MACHINES = [machine(number) for number in range(24)]
SMALL = st.recursive(
    st.builds(In, st.sampled_from(["msb", "label.a"]), st.frozensets(st.sampled_from("ab18")))
    | st.builds(Compare, st.sampled_from(["gpus", "label.a"]), SIGNS, COUNTS)
    | st.builds(Exists, st.sampled_from(["gpus", "label.a", "label.b-2"])),
    lambda inner: (
        st.builds(Not, inner)
        | st.builds(AllOf, st.lists(inner, min_size=2, max_size=3).map(tuple))
        | st.builds(AnyOf, st.lists(inner, min_size=2, max_size=3).map(tuple))
    ),
    max_leaves=6,
)


def model(term: object) -> set[str]:
    """Return the machines that meet a term, by sets."""
    all_names = {m.name for m in MACHINES}
    match term:
        case Not(inner):
            return all_names - model(inner)
        case AllOf(terms):
            return set.intersection(*map(model, terms))
        case AnyOf(terms):
            return set.union(*map(model, terms))
    return {m.name for m in MACHINES if holds(term, m)}  # type: ignore[arg-type]


@given(SMALL)
def test_and_or_and_not_are_those_of_sets(term):
    assert {m.name for m in MACHINES if holds(term, m)} == model(term)


@given(SMALL, st.sets(st.sampled_from(["msb", "gpus", "label.a"])).map(frozenset))
def test_excluded_properties_are_met_by_no_machine(term, known):
    for m in MACHINES:
        if holds(term, m):
            assert may_hold(term, m, known)
