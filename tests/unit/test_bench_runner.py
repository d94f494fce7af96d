"""`make bench` runs every bench there is. A repeated bench keeps the results of the others."""

import ast
import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = runpy.run_path(str(ROOT / "tests/bench/run.py"))


def test_every_bench_is_found_and_declares_if_it_needs_a_guest():
    found = {bench.name: bench.needs_guest for bench in RUN["benches"]()}
    measuring = {
        path.stem
        for path in (ROOT / "tests/bench").glob("*.py")
        if '__name__ == "__main__"' in path.read_text() and path.stem != "run"
    }
    assert found.keys() == measuring
    assert {name for name, guest in found.items() if guest} == {
        "footprint",
        "images",
        "start_many",
        "task_start",
        "task_hardening",
    }
    assert all('"--json"' in (ROOT / f"tests/bench/{n}.py").read_text() for n in found)


def test_the_shared_guest_has_the_largest_memory_of_any_bench(tmp_path):
    needs = {"small": "CPUS = 2\n", "large": "MEMORY_MIB = 4096\n", "here": "MEMORY_MIB = 1\n"}
    for name, content in needs.items():
        guest = "" if name == "here" else "NEEDS_GUEST = True\n"
        (tmp_path / f"{name}.py").write_text(f"{guest}{content}def main(): ...\n")
    found = RUN["benches"](tmp_path)
    assert {b.name: (b.needs_guest, b.memory_mib, b.cpus) for b in found} == {
        "small": (True, 0, 2),
        "large": (True, 4096, 1),
        "here": (False, 1, 1),
    }
    calls = []
    guest = RUN["_PendingConnection"](max(b.memory_mib for b in found))
    guest._lab = lambda *words: calls.append(words)
    assert guest.name() == guest.name() == guest.name(2) == "bench"
    guest.down()
    assert [words[0] for words in calls] == ["down", "up", "down", "up", "down"]
    assert {words[-2:] for words in calls if words[0] == "up"} == {("--memory-mib", "4096")}
    assert [words[words.index("--cpus") + 1] for words in calls if "--cpus" in words] == ["1", "2"]


def test_only_a_bench_in_a_guest_gets_the_guests_name():
    bench = RUN["Bench"]("store", "How fast?", False)
    assert RUN["command"](bench, "") == [sys.executable, "-m", "tests.bench.store", "--json"]
    assert RUN["command"](bench, "bench")[-2:] == ["--lab", "bench"]


def test_one_section_is_rewritten_and_the_others_stay():
    one, two = (RUN["Bench"](name, f"About {name}.", False) for name in ("one", "two"))
    result = {"ms": 1.25, "deep": {"n": 12_345}, "list": [1, 2]}
    first = RUN["section"](two, {**result, "details": {"ms": {"1": 9.75}}}, "abc")
    assert first == RUN["section"](two, result, "abc"), "details are shown on request"
    page = RUN["merged"]("", {"two": first})
    page = RUN["merged"](page, {"one": RUN["failed"](one, "ended with 3", "abc")})
    assert page.index("## one") < page.index("## two")
    assert "**It failed**: ended with 3" in page
    for row in ("| `ms` | 1.25 |", "| `deep.n` | 12,345 |", "| `list` | [1, 2] |"):
        assert row in page
    again = RUN["merged"](page, {"one": RUN["section"](one, {"ms": 2}, "def")})
    assert "It failed" not in again
    assert again.count("## one") == again.count("## two") == 1
    assert RUN["merged"](again, {}) == again


@pytest.mark.parametrize(
    ("out", "code", "why"),
    [
        ("", 0, "its last line is no JSON"),
        ("nothing", 0, "its last line is no JSON"),
        ("[1]", 0, "its last line is no object"),
        ("{}", 3, "ended with 3"),
    ],
)
def test_a_bench_without_figures_fails_with_a_reason(monkeypatch, out, code, why):
    class Done:
        stdout, returncode = out, code

    monkeypatch.setattr(RUN["subprocess"], "run", lambda *_, **__: Done)
    with pytest.raises(RuntimeError, match=why):
        RUN["measured"](["x"])


def test_figures_are_the_last_line(monkeypatch):
    class Done:
        stdout, returncode = "building …\n" + json.dumps({"ms": 1}) + "\n", 0

    monkeypatch.setattr(RUN["subprocess"], "run", lambda *_, **__: Done)
    assert RUN["measured"](["x"]) == {"ms": 1}


def _invented(text: str) -> list[str]:
    """Return the keys of figures that repeat another figure, or that are constant in some cases."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Dict):
            continue
        seen: set[str] = set()
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or isinstance(value, ast.Constant):
                continue
            source = ast.unparse(value)
            branches = (value.body, value.orelse) if isinstance(value, ast.IfExp) else ()
            is_number = any(
                isinstance(b, ast.Constant) and isinstance(b.value, int | float) for b in branches
            )
            # each call is a new measurement
            repeats = source in seen and not isinstance(value, ast.Call)
            if repeats or is_number:
                found.append(str(key.value))
            seen.add(source)
    return found


@pytest.mark.behaviour("BUG-AU6")
def test_no_bench_prints_a_constant_or_one_figure_by_two_names():
    assert _invented("{'a': f(), 'b': x['y'], 'c': x['y']}") == ["c"]
    assert _invented("{'a': max(s) if s else 0}") == ["a"]
    paths = [ROOT / f"tests/bench/{bench.name}.py" for bench in RUN["benches"]()]
    assert len(paths) > 10
    found = {path.name: _invented(path.read_text()) for path in paths}
    assert {name: keys for name, keys in found.items() if keys} == {}
