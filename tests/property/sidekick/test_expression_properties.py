"""Every expression that a profile can contain ends within its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidekick.expression import MAX_NUMBER, ExpressionError, Fact, parse

FACTS: dict[str, Fact] = {"a.n": 7, "a.zero": 0, "a.s": "x", "a.b": True, "a.l": [1, 2]}
LEAVES = st.sampled_from(
    ["1", "0", "2.5", "9223372036854775807", "'x'", "true", "a.n", "a.zero", "a.s", "a.b", "a.l"]
)
NUMBERS = st.recursive(
    st.integers(0, 1000).map(str),
    lambda part: st.builds("({} {} {})".format, part, st.sampled_from("+-*"), part),
    max_leaves=8,
)


def _grown(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    sign = st.sampled_from(["+", "*", "//", "/", "%", "<", "==", "in", "and", "or"])
    return (
        st.builds("{} {} {}".format, part, sign, part)
        | st.builds("({} if {} else {})".format, part, part, part)
        | st.builds("{}({}, {})".format, st.sampled_from(["min", "max", "floor"]), part, part)
        | st.builds("not {}".format, part)
    )


@given(st.text(max_size=80) | st.recursive(LEAVES, _grown, max_leaves=12))
def test_an_expression_has_a_bounded_value_or_an_error(text: str) -> None:
    try:
        value = parse(text).evaluate(FACTS)
    except ExpressionError:
        return
    if isinstance(value, int | float):
        assert -MAX_NUMBER <= value < MAX_NUMBER


@given(NUMBERS)
def test_arithmetic_is_that_of_integers(text: str) -> None:
    try:
        value = parse(text).evaluate({})
    except ExpressionError:
        return
    assert value == eval(text)
