"""Finds where code may be changed, and copies the tree with all drawn changes behind switches."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SWITCH = '''"""Which change is on, and which ones were passed."""
import os
number = int(os.environ.get("TWINE_MUTANT", 0))
passed = set()
def on(mutant):
    passed.add(mutant)
    return mutant == number
'''
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
_DROPPED = (ast.Expr, ast.AugAssign, ast.Assign, ast.Raise, ast.Return)
_UNTOUCHED = (ast.JoinedStr, ast.pattern, ast.Import, ast.ImportFrom)
"""Texts, patterns and imports: changing them is a syntax error or changes no behaviour."""
_SEQUENCES = (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple)
_LOGS = ("log", "logger", "_log", "logging")
"""Receivers of calls that are not dropped: no test checks lines of the program's own log."""


Site = tuple[ast.AST, str, ast.AST]
"""The node, the kind of change, and the changed node."""


@dataclass(frozen=True)
class Mutant:
    """One change. `number` (from 1) is its switch; the texts before and after the change are for
    people."""

    number: int
    room: str
    path: str
    site: int
    """Which of the sites of its module this is, from 0."""
    line: int
    operator: str
    before: str
    after: str

    @property
    def key(self) -> str:
        """Return an identifier that survives moved lines."""
        return f"{self.path}: {self.operator}: {self.before} → {self.after}"


def drawn(root: Path, rooms: dict[str, list[str]], count: int, seed: int) -> list[Mutant]:
    """Draw the same number of changes for each room, as far as it has that many. A seed determines
    them.

    The draw of one function does not depend on other functions. So a change of the code replaces
    few of the mutants that were judged before.
    """
    found: list[tuple[str, str, int, Site]] = []
    for i, (room, globs) in enumerate(rooms.items()):
        lots = {}
        for path in sorted({p for glob in globs for p in root.glob(glob)}):
            name = str(path.relative_to(root))
            sites = _Sites(ast.parse(path.read_text()))
            for at, (site, where) in enumerate(zip(sites.found, sites.names, strict=True)):
                lot = hashlib.sha256(f"{seed} {name} {where}".encode()).digest()
                lots[lot] = room, name, at, site
        share = (count - len(found)) // (len(rooms) - i)
        found += [lots[lot] for lot in sorted(lots)[:share]]
    return [
        Mutant(n, room, path, at, _line(node), operator, _short(node), _short(changed))
        for n, (room, path, at, (node, operator, changed)) in enumerate(found, 1)
    ]


def plant(root: Path, mutants: list[Mutant]) -> None:
    """Write all changes and their switches into the modules below `root`, a copy of the tree."""
    (root / "mutation_switch.py").write_text(SWITCH)
    for path in {m.path for m in mutants}:
        tree = ast.parse((root / path).read_text())
        sites = _Sites(tree).found
        changes: dict[int, list[tuple[int, str]]] = {}
        for mutant in mutants:
            if mutant.path == path:
                node, operator, _ = sites[mutant.site]
                changes.setdefault(id(node), []).append((mutant.number, operator))
        tree = _Planter(changes).visit(tree)
        after = next(
            i for i, n in enumerate(tree.body)
            if not (isinstance(n, ast.ImportFrom) and n.module == "__future__") and not _is_text(n)
        )  # fmt: skip
        tree.body.insert(after, ast.parse("import mutation_switch as _mutation").body[0])
        (root / path).write_text(ast.unparse(ast.fix_missing_locations(tree)))


class _Sites:
    """Collects everything in functions that can be changed. Code that runs at import is not drawn:
    it is settings."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: list[Site] = []
        self.names: list[str] = []
        """For each site: its class and function, and its number among the sites there."""
        self._counts = Counter[str]()
        self._walk(tree, "", inside=False)

    def _walk(self, node: ast.AST, where: str, inside: bool) -> None:
        if isinstance(node, _UNTOUCHED):
            return
        if inside:
            for operator in operators(node):
                self.found.append((node, operator, change(node, operator)))
                self.names.append(f"{where} {self._counts[where]}")
                self._counts[where] += 1
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function or isinstance(node, ast.ClassDef):
            where = f"{where}.{getattr(node, 'name', '')}"
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            within = inside or (is_function and name == "body")
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self._walk(child, where, within)


def operators(node: ast.AST) -> Iterator[str]:
    """Yield how a node itself can be changed. Its children are sites of their own."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield (
            "boundary"
            if isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            else "negated"
        )
    elif isinstance(node, ast.BoolOp):
        yield "and/or"
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _SWAPS:
        if not any(isinstance(n, _SEQUENCES) or _is_str(n) for n in ast.iter_child_nodes(node)):
            yield "arithmetic"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield from ("constant + 1", "constant - 1")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed"
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("min", "max")
    ):
        yield "min/max"
    condition = _condition(node)
    # comparisons and `not` are sites of their own
    if condition and not isinstance(condition, ast.Compare | ast.UnaryOp):
        yield "condition negated"
    if isinstance(node, _DROPPED) and _may_drop(node):
        yield "dropped"


def change(node: ast.AST, operator: str) -> ast.AST:
    """Return a changed copy of the node with the same children."""
    new = copy.copy(node)
    if operator in ("boundary", "negated"):
        new.ops = [_SWAPS[type(node.ops[0])]()]
    elif operator in ("and/or", "arithmetic"):
        new.op = _SWAPS[type(node.op)]()
    elif operator.startswith("constant"):
        new.value = node.value + (1 if "+" in operator else -1)
    elif operator == "not removed":
        return node.operand
    elif operator == "min/max":
        new.func = ast.Name({"min": "max", "max": "min"}[node.func.id], ast.Load())
    elif operator == "condition negated":
        negated = ast.UnaryOp(ast.Not(), _condition(node))
        if isinstance(node, ast.comprehension):
            new.ifs = [negated, *node.ifs[1:]]
        else:
            new.test = negated
    elif isinstance(node, ast.Return):
        truth = getattr(node.value, "value", None)
        new.value = ast.Constant(not truth) if isinstance(truth, bool) else None
    else:
        new = ast.copy_location(ast.Pass(), node)
    return new


class _Planter(ast.NodeTransformer):
    """Puts switches around the nodes that have changes."""

    def __init__(self, changes: dict[int, list[tuple[int, str]]]) -> None:
        self._changes = changes

    def visit(self, node: ast.AST) -> ast.AST:
        wanted = self._changes.get(id(node), ())
        node = self.generic_visit(node)
        result = node
        for number, operator in wanted:
            switch = ast.parse(f"_mutation.on({number})", mode="eval").body
            if operator == "condition negated":
                condition = _condition(node)
                both = ast.IfExp(switch, ast.UnaryOp(ast.Not(), condition), condition)
                if isinstance(node, ast.comprehension):
                    node.ifs[0] = both
                else:
                    node.test = both
            elif isinstance(node, ast.stmt):
                result = ast.If(switch, [change(node, operator)], [result])
            else:
                result = ast.IfExp(switch, change(node, operator), result)
        return result


def _condition(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.comprehension):
        return node.ifs[0] if node.ifs else None
    return node.test if isinstance(node, ast.If | ast.While | ast.IfExp) else None


def _may_drop(node: ast.stmt) -> bool:
    value = getattr(node, "value", None)
    if isinstance(node, ast.Assign):
        return all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
    if isinstance(node, ast.Return):
        empty = isinstance(value, ast.Constant) and not value.value and value.value is not False
        return value is not None and not empty
    if isinstance(node, ast.Expr):
        call = value.value if isinstance(value, ast.Await) else value
        return isinstance(call, ast.Call) and ast.unparse(call).split(".")[0] not in _LOGS
    return True


def _is_str(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and _is_str(node.value)


def _line(node: ast.AST) -> int:
    return node.target.lineno if isinstance(node, ast.comprehension) else node.lineno


def _short(node: ast.AST) -> str:
    """Return the node's text on one line. For a statement with a body, return its first line."""
    if isinstance(node, ast.comprehension):
        return ast.unparse(node).strip()
    return ast.unparse(node).splitlines()[0]
