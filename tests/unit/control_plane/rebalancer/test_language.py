"""Models of placement in TOML: read, described as text, and solved in two ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.rebalancer.core.annealing import annealed
from control_plane.rebalancer.core.exact import optimum
from control_plane.rebalancer.core.language import (
    Above,
    AtMostIn,
    FitsIn,
    ModelContainer,
    ModelObject,
    PlacementAnswer,
    PlacementModel,
    UsedContainers,
    describe_model,
    read_model,
    toml_of,
)
from tests.bench.roadef import checked, generated, instances, read_instance
from wire.errors import InvalidInput

pytestmark = pytest.mark.behaviour("RE2", "RE4")

ROOT = Path(__file__).resolve().parents[4]
TEXT = """
[[container]]
name = "m1"
offers = { cpu = 10 }
scopes = { msb = "a" }
[[container]]
name = "m2"
offers = { cpu = 10 }
scopes = { msb = "b" }
[[object]]
name = "web-0"
at = "m1"
group = "web"
needs = { cpu = 4 }
[[object]]
name = "web-1"
at = "m1"
group = "web"
needs = { cpu = 5 }
may = ["m1"]
[[constraint]]
kind = "fits"
dimension = "cpu"
[[constraint]]
kind = "at-most"
scope = "msb"
objects = 2
[[goal]]
kind = "even"
dimension = "cpu"
[[goal]]
kind = "moves"
each = 0.01
[[goal]]
kind = "above"
dimension = "cpu"
scope = "msb"
level = { a = 8, b = 8 }
"""


def steps(model: PlacementModel, number: int = 40_000) -> PlacementAnswer:
    return annealed(model, lambda: 0.0, 1.0, steps=number)


def test_a_model_is_read_from_toml_and_solved() -> None:
    model = read_model(TEXT)

    for answer in (steps(model), optimum(model, lambda: 0.0, 10.0)):
        assert answer.moves == [("web-0", "m1", "m2")]
        assert answer.before == pytest.approx(0.9 - 0.45 - 0.1 + 1.0)
        assert answer.after == pytest.approx(0.01)


def test_the_example_of_the_page_is_a_model() -> None:
    page = (ROOT / "docs" / "rebalancing.md").read_text()
    _, _, rest = page.partition("## Models in TOML\n```toml\n")

    model = read_model(rest.partition("```")[0])

    assert [container.name for container in model.containers] == ["m1", "m2"]
    assert model.constraints
    assert model.goals


def test_a_model_is_described_in_text() -> None:
    assert describe_model(read_model(TEXT)) == [
        "2 objects in 2 containers.",
        "1 groups of 2 objects.",
        "Dimension cpu: 9 of 20 (45%) in use.",
        "Scope msb: 2 bins of 1 containers.",
        "1 objects may be in some containers only.",
        "Constraint: no container has more cpu in use than it offers.",
        "Constraint: at most 2 objects of a group per msb.",
        "Goal: less of 1 x share of cpu in use of each container above the average plus 10%.",
        "Goal: less of 1 x (price + 0.01) of each object that moves.",
        "Goal: less of 1 x cpu in use of each msb above its level.",
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_toml_form_of_a_model_is_the_model(seed: int) -> None:
    for model in (read_model(TEXT), read_instance(*generated(seed))):
        assert read_model("\n".join(toml_of(model))) == model


@pytest.mark.parametrize(
    ("wrong", "right", "why"),
    [
        ('at = "m1"', 'at = "m9"', "names the container 'm9', which does not exist"),
        ('name = "web-1"', 'name = "web-0"', "2 objects are named 'web-0'"),
        (
            'dimension = "cpu"',
            'dimension = "cup"',
            "names the dimension 'cup', which no object or container has",
        ),
        ('scope = "msb"', 'scope = "mbs"', "names the scope 'mbs', which no container has"),
        ("cpu = 4", "cpu = -4", "needs -4 cpu: not a number of at least 0"),
        ("each", "eahc", "unknown field `eahc`"),
        ('kind = "fits"', 'kind = "fit"', "'fit'"),
        ("[[goal]]", "[goal]]", "is not TOML"),
    ],
)
def test_errors_of_a_model_are_reported(wrong: str, right: str, why: str) -> None:
    assert wrong in TEXT

    with pytest.raises(InvalidInput, match=why.replace("[", r"\[")):
        read_model(TEXT.replace(wrong, right, 1))


@pytest.mark.behaviour("BUG-UX90")
@pytest.mark.parametrize(
    ("wrong", "right", "why"),
    [
        ("offers = { cpu = 10 }", "offers = { cpu = nan }", "'m1' offers nan cpu: not a number"),
        ("offers = { cpu = 10 }", "offers = { cpu = -1 }", "'m1' offers -1 cpu: not a number"),
        ("offers = { cpu = 10 }", "offers = { cpu = inf }", "'m1' offers inf cpu: not a number"),
        ('at = "m1"', 'at = "m1"\nmove_price = nan', "'web-0' has the move_price nan"),
        ("each = 0.01", "each = nan", "'moves' has nan as each: not a number"),
        ("b = 8", "b = inf", "'above' has inf as level: not a number"),
    ],
)
def test_amounts_that_cannot_be_added_up_are_refused(wrong: str, right: str, why: str) -> None:
    """Formerly the answer was "goals nan -> nan, which is the best"."""
    assert wrong in TEXT

    with pytest.raises(InvalidInput, match=why):
        read_model(TEXT.replace(wrong, right, 1))


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10_000))
def test_annealing_counts_as_a_checker_does_breaks_nothing_and_is_near_the_optimum(
    seed: int,
) -> None:
    """The models have the form of Google's instances: transient use, spread, dependencies,
    conflicts."""
    model = read_instance(*generated(seed, machines=5, processes=10))
    where = {o.name: o.at for o in model.objects}
    before, wrong = checked(model, where)
    assert wrong == []

    found, best = steps(model, 40_000), optimum(model, lambda: 0.0, 20.0)

    for answer in (found, best):
        after, wrong = checked(model, where | {o: to for o, _, to in answer.moves})
        assert wrong == []
        assert (before, after) == pytest.approx((answer.before, answer.after))
    assert best.is_optimal
    assert best.bound == pytest.approx(best.after, rel=1e-6, abs=1e-6)
    assert best.after - 1e-6 <= found.after <= best.after + 0.1 * (before - best.after) + 1e-6


def test_a_folder_without_instances_is_refused_with_the_right_place(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no model_.*gturri/roadef2012"):
        next(instances(tmp_path, []))
    model, assignment = generated(2)
    (tmp_path / "model_x.txt").write_text(model)
    (tmp_path / "assignment_x.txt").write_text(assignment)
    with pytest.raises(SystemExit, match="no instance 'y'"):
        next(instances(tmp_path, ["y"]))

    assert list(instances(tmp_path, [])) == [("x", read_instance(model, assignment))]


def test_the_same_seed_and_steps_give_the_same_answer() -> None:
    model = read_instance(*generated(3))

    assert steps(model, 5_000) == steps(model, 5_000)


def test_a_moving_object_still_uses_transient_resources_at_its_source() -> None:
    rules = [FitsIn(dimension="disk", twice_while_moving=True)]
    model = PlacementModel(
        objects=[
            ModelObject(name="big", at="m1", needs={"disk": 6, "cpu": 9}),
            ModelObject(name="small", at="m2", needs={"disk": 5, "cpu": 1}),
        ],
        containers=[ModelContainer(name=m, offers={"disk": 10, "cpu": 9}) for m in ("m1", "m2")],
        constraints=rules,
        goals=[Above(dimension="cpu", level={"m1": 1.0, "m2": 9.0})],
    )

    assert steps(model).moves == optimum(model, lambda: 0.0, 5.0).moves == []


def test_few_containers_are_used_where_that_is_wanted() -> None:
    model = PlacementModel(
        objects=[ModelObject(name=f"o{n}", at=f"m{n}", needs={"cpu": 3}) for n in range(6)],
        containers=[ModelContainer(name=f"m{n}", offers={"cpu": 10}) for n in range(6)],
        constraints=[FitsIn(dimension="cpu"), AtMostIn(by_group={})],
        goals=[UsedContainers()],
    )

    assert optimum(model, lambda: 0.0, 10.0).after == 2
    assert steps(model).after == 2
