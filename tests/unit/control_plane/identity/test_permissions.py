"""Which caller may do what, as a pure decision: deny by default, and report what is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.api.people import Needs
from control_plane.identity.core.permissions import Caller, refusal

ANN = Caller("ann", groups=frozenset(("web",)))
ROOT = Caller("root", is_operator=True)
NAMES = st.sampled_from(["user:ann", "user:bob", "group:web", "group:db", "user:web"])


@given(st.text(max_size=12), st.dictionaries(st.text(max_size=3), st.none() | st.lists(NAMES)))
def test_an_operator_may_do_everything_and_a_viewer_nothing_that_has_no_rule(
    needs: str, about: dict[str, list[str] | None]
) -> None:
    assert refusal(needs, ROOT, about) is None
    if needs not in list(Needs):
        assert refusal(needs, ANN, about) is not None


@given(st.dictionaries(st.text(max_size=3), st.none() | st.lists(NAMES), max_size=4))
def test_an_owner_owns_everything_that_a_call_is_about(about: dict[str, list[str] | None]) -> None:
    owns = all(o is not None and {"user:ann", "group:web"} & set(o) for o in about.values())
    assert (refusal(Needs.OWNER, ANN, about) is None) is owns
    known = {name: o for name, o in about.items() if o is not None}
    assert (refusal(Needs.ASKER, ANN, about) is None) is (refusal(Needs.OWNER, ANN, known) is None)


@pytest.mark.parametrize(
    ("needs", "message", "way"),
    [
        (
            Needs.OWNER,
            "ann does not own entitlement 'db', which belongs to user:bob",
            "--add-owner",
        ),
        (Needs.ANY_OWNER, "ann owns no entitlement", "twinectl entitlement request"),
        (Needs.APPROVER, "ann may not decide requests", "portal.approvers"),
        (Needs.OPERATOR, "ann is not an operator", "twinectl role grant user:ann operator"),
    ],
)
def test_a_refusal_names_the_missing_right_and_how_to_get_it(
    needs: Needs, message: str, way: str
) -> None:
    found = refusal(needs, ANN, {"db": ["user:bob"]})
    assert found is not None
    assert message in found.reason
    assert way in found.hint


def test_an_entitlement_without_owners_belongs_to_the_operators() -> None:
    """A release without owners stored entitlements that no user owns."""
    found = refusal(Needs.OWNER, ANN, {"old": []})
    assert found is not None
    assert "belongs to the operators only" in found.reason


def test_a_user_is_not_the_group_of_the_same_name() -> None:
    assert not Caller("web").is_among(["group:web"])
    assert not Caller("ann", groups=frozenset(("web",))).is_among(["user:web"])
