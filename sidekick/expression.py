"""Expressions of facts, as profiles write them: `min(memory.total_bytes // 20, 256MiB)`.

The grammar is small, and no text reaches an interpreter: numbers, sizes, texts, lists, the host's
facts, arithmetic, comparison, `and or not in`, `a if c else b`, five functions. There are no loops,
no variables, and no text operations except comparison. Text, depth, lists and numbers are bounded,
so evaluation is bounded too. The same facts always give the same value.

    choice  = either ["if" either "else" choice]
    either  = both {"or" both}            both = negated {"and" negated}
    negated = "not" negated | compared    compared = sum [("=="|"!="|"<="|">="|"<"|">"|"in") sum]
    sum     = product {("+"|"-") product} product = signed {("*"|"//"|"/"|"%") signed}
    signed  = "-" signed | atom
    atom    = number | size | text | "true" | "false" | fact | function "(" choice {"," choice} ")"
            | "[" [choice {"," choice}] "]" | "(" choice ")"
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from wire.errors import InvalidInput

Fact = int | float | str | bool | list[int] | list[str]
Value = int | float | str | bool | list["Value"]
Facts = Mapping[str, Fact]

MAX_TEXT = 500
MAX_DEPTH = 20
MAX_LIST = 64
MAX_NUMBER = 1 << 63
SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)(?P<size>[KMGT]iB)?(?![\w.])"
    r"|(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<name>[A-Za-z_]\w*(?:\.\w+)*)"
    r"|(?P<sign>==|!=|<=|>=|//|[-+*/%<>()\[\],]))"
)
_WORDS = {"and", "or", "not", "in", "if", "else"}


class ExpressionError(InvalidInput):
    """An expression that cannot be parsed, or that has no value for these facts."""


class _Node(msgspec.Struct, frozen=True):
    """An operation on the values of its parts; a leaf has a value or names a fact."""

    op: str
    parts: tuple[_Node, ...] = ()
    value: Value = 0


class Expression(msgspec.Struct, frozen=True):
    """A parsed expression."""

    text: str
    _root: _Node

    @property
    def facts(self) -> set[str]:
        """The facts that it names, in any branch."""
        return {str(node.value) for node in _walk(self._root) if node.op == "fact"}

    def evaluate(self, facts: Facts) -> Value:
        """Return the value on these facts. Raises `ExpressionError`."""
        try:
            return _evaluate(self._root, facts)
        except ExpressionError as e:
            raise ExpressionError(f"{self.text!r}: {e}", hint=e.hint) from e


def parse(text: str) -> Expression:
    """Return the expression in a text. Raises `ExpressionError` with the place of the error."""
    if len(text) > MAX_TEXT:
        raise ExpressionError(f"an expression has at most {MAX_TEXT} characters")
    parser = _Parser(list(_tokens(text)))
    try:
        root = parser.choice()
        if parser.peek() != ("end", ""):
            raise ExpressionError(f"{parser.peek()[1]!r} is unexpected")
    except ExpressionError as e:
        raise ExpressionError(f"{text!r}: {e}") from e
    return Expression(text, root)


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if found is None:
            raise ExpressionError(f"{text!r}: cannot read {text[at:].strip()[:20]!r}")
        at = found.end()
        kind = "number" if found["size"] else str(found.lastgroup)
        word = found[0].strip()
        yield ("sign" if kind == "name" and word in _WORDS else kind), word


class _Parser:
    """Recursive descent; one method for each rule of the grammar."""

    def __init__(self, tokens: Sequence[tuple[str, str]]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0

    def peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        token = self.peek()
        self._at += 1
        return token

    def _accept(self, *signs: str) -> str:
        """Return the next token if it is one of these, else ""."""
        kind, word = self.peek()
        if kind == "sign" and word in signs:
            self._at += 1
            return word
        return ""

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            raise ExpressionError(f"{sign!r} was expected before {self._next_text()}")

    def _next_text(self) -> str:
        return repr(self.peek()[1]) if self.peek()[1] else "its end"

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"it is nested deeper than {MAX_DEPTH} levels")

    def choice(self) -> _Node:
        self._enter()
        node = self._chain(self._both, "or")
        if self._accept("if"):
            condition = self._chain(self._both, "or")
            self._expect("else")
            node = _Node("if", (condition, node, self.choice()))
        self._depth -= 1
        return node

    def _both(self) -> _Node:
        return self._chain(self._negated, "and")

    def _negated(self) -> _Node:
        if self._accept("not"):
            self._enter()
            node = _Node("not", (self._negated(),))
            self._depth -= 1
            return node
        left = self._sum()
        sign = self._accept("==", "!=", "<=", ">=", "<", ">", "in")
        return _Node(sign, (left, self._sum())) if sign else left

    def _sum(self) -> _Node:
        return self._chain(lambda: self._chain(self._signed, "*", "//", "/", "%"), "+", "-")

    def _chain(self, part: Callable[[], _Node], *signs: str) -> _Node:
        node = part()
        while sign := self._accept(*signs):
            node = _Node(sign, (node, part()))
        return node

    def _signed(self) -> _Node:
        if self._accept("-"):
            self._enter()
            node = _Node("negative", (self._signed(),))
            self._depth -= 1
            return node
        return self._atom()

    def _atom(self) -> _Node:
        kind, word = self._next()
        if kind == "number":
            return _Node("value", value=_number(word))
        if kind == "text":
            return _Node("value", value=word[1:-1])
        if kind == "name":
            if word in ("true", "false"):
                return _Node("value", value=word == "true")
            if self._accept("("):
                return _Node(_function(word), self._list(")"))
            return _Node("fact", value=word)
        if word == "(":
            node = self.choice()
            self._expect(")")
            return node
        if word == "[":
            return _Node("list", self._list("]"))
        self._at -= 1
        raise ExpressionError(f"a value was expected before {self._next_text()}")

    def _list(self, end: str) -> tuple[_Node, ...]:
        parts: list[_Node] = []
        while not self._accept(end):
            if parts:
                self._expect(",")
            parts.append(self.choice())
            if len(parts) > MAX_LIST:
                raise ExpressionError(f"a list has at most {MAX_LIST} members")
        return tuple(parts)


def _number(word: str) -> int | float:
    size = SIZES.get(word[-3:])
    digits = word[:-3] if size else word
    number = float(digits) if "." in digits else int(digits)
    return _check_bounds(int(_check_bounds(number) * size) if size else number)


def _function(name: str) -> str:
    if name not in _FUNCTIONS:
        raise ExpressionError(f"there is no function {name!r}; there are {', '.join(_FUNCTIONS)}")
    return name


def _walk(node: _Node) -> Iterator[_Node]:
    yield node
    for part in node.parts:
        yield from _walk(part)


def _evaluate(node: _Node, facts: Facts) -> Value:
    match node.op:
        case "value":
            return node.value
        case "fact":
            return _fact(str(node.value), facts)
        case "list":
            return [_evaluate(part, facts) for part in node.parts]
        case "if":
            condition, yes, no = node.parts
            return _evaluate(yes if _truth(_evaluate(condition, facts)) else no, facts)
        case "and" | "or":
            first = _truth(_evaluate(node.parts[0], facts))
            if first is (node.op == "or"):
                return first
            return _truth(_evaluate(node.parts[1], facts))
        case "not":
            return not _truth(_evaluate(node.parts[0], facts))
    values = [_evaluate(part, facts) for part in node.parts]
    if node.op in ("==", "!="):
        return (values[0] == values[1]) is (node.op == "==")
    if node.op == "in":
        if not isinstance(values[1], list):
            raise ExpressionError("`in` needs a list on its right")
        return values[0] in values[1]
    if node.op in _COMPARISONS:
        return _compare(node.op, values[0], values[1])
    return _check_bounds(_compute(node.op, values))


def _fact(name: str, facts: Facts) -> Value:
    if name not in facts:
        group = name.partition(".")[0] + "."
        near = sorted(known for known in facts if known.startswith(group)) or sorted(facts)
        raise ExpressionError(f"there is no fact {name}", hint=f"there are {', '.join(near)}")
    value = facts[name]
    return [*value] if isinstance(value, list) else value


def _truth(value: Value) -> bool:
    if not isinstance(value, bool):
        raise ExpressionError(f"{value!r} is neither true nor false")
    return value


def _compare(op: str, left: Value, right: Value) -> bool:
    numbers = _is_number(left) and _is_number(right)
    if not (numbers or (type(left) is type(right) and not isinstance(left, bool))):
        raise ExpressionError(f"{left!r} and {right!r} cannot be compared")
    try:
        return _COMPARISONS[op](left, right)
    except TypeError:
        raise ExpressionError(f"{left!r} and {right!r} cannot be compared") from None


def _compute(op: str, values: Sequence[Value]) -> int | float:
    if op in ("min", "max") and len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    numbers: list[int | float] = []
    for value in values:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ExpressionError(f"{op} computes with numbers, not with {value!r}")
        numbers.append(value)
    least, most = _ARITY.get(op, (1, MAX_LIST))
    if not least <= len(numbers) <= most:
        raise ExpressionError(f"{op} takes {least if least == most else f'at least {least}'}")
    try:
        return _NUMERIC[op](*numbers)
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_bounds(value: int | float) -> int | float:
    if not -MAX_NUMBER <= value < MAX_NUMBER:
        raise ExpressionError("a number is beyond 64 bits")
    return value


_COMPARISONS: dict[str, Callable[[object, object], bool]] = {
    "<": operator.lt,  # type: ignore[dict-item]
    "<=": operator.le,  # type: ignore[dict-item]
    ">": operator.gt,  # type: ignore[dict-item]
    ">=": operator.ge,  # type: ignore[dict-item]
}
_FUNCTIONS: dict[str, Callable[..., int | float]] = {
    "min": lambda *numbers: min(numbers),
    "max": lambda *numbers: max(numbers),
    "floor": math.floor,
    "ceil": math.ceil,
    "clamp": lambda value, low, high: max(low, min(value, high)),
}
_NUMERIC: dict[str, Callable[..., int | float]] = _FUNCTIONS | {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "negative": operator.neg,
}
_ARITY = {"floor": (1, 1), "ceil": (1, 1), "clamp": (3, 3)}
