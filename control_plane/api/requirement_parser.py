"""Parses requirements of machines, as users write them: `rack in (r1, r2) and not gpus > 4`.

Jobs (`requires`), entitlements (`requires`) and `twinectl machine list --where` are read by this
one parser. docs/requirements-grammar.md is made from it by `tools/requirements-grammar`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from typing import NamedTuple

from control_plane.api.policy import LABEL_NAME, MAX_EXPRESSION
from control_plane.api.requirements import (
    CAPABILITY,
    FOR_JOBS,
    KEYWORDS,
    LABEL,
    NUMBERS,
    OF_RECORDS,
    SIZES,
    TEXTS,
    AllOf,
    AnyOf,
    Because,
    Compare,
    Exists,
    In,
    Not,
    Term,
)
from wire.errors import InvalidInput
from wire.units import size

MAX_TERMS = 200
"""Comparisons in one text."""
MAX_DEPTH = 16
"""Nesting depth of parentheses and `not`."""
MAX_ERRORS = 16
"""Errors that are listed for one text; the parser stops there."""
_GUESSED_CHARS = 40
"""Characters of an unknown name for which a suggestion is searched."""


def parse(text: str, known: frozenset[str] = FOR_JOBS) -> Term:
    """Return what a text means, or raise `InvalidInput` with everything that is wrong with it."""
    term, errors = parse_with_errors(text, known)
    if term is None or errors:
        listed = "; ".join(errors)
        raise InvalidInput(
            f"the requirement {_short(text)} cannot be read: {listed}",
            hint="docs/requirements-grammar.md has every property and operator",
        )
    return term


@lru_cache(maxsize=4096)
def parse_with_errors(
    text: str, known: frozenset[str] = FOR_JOBS
) -> tuple[Term | None, tuple[str, ...]]:
    """Return the meaning of a text and its errors, each with its place in the text."""
    if len(text) > MAX_EXPRESSION:
        return None, (f"it has {len(text)} characters; the maximum is {MAX_EXPRESSION}",)
    parser = _RequirementParser(known)
    try:
        term = parser.parse_all(text)
    except _TooManyErrors:
        term = None
    return term, tuple(dict.fromkeys(parser.errors))


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:120]}…")


_TOKEN = re.compile(
    r"""\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<sign><=|>=|!=|==|[=<>(),])"""
    r"""|(?P<bare>[A-Za-z0-9_./:+-]+)|(?P<unknown>\S))""",
    re.DOTALL,
)
_LABEL_NAME = re.compile(LABEL_NAME)
_NUMBER = re.compile(r"\d{1,15}(\.\d{1,9})?", re.ASCII)
_OTHER_OPERATORS = {
    "==": "=",
    "&&": "and",
    "||": "or",
    "!": "not",
    "AND": "and",
    "OR": "or",
    "NOT": "not",
}
"""Operators of other languages → those of this one."""


class _Token(NamedTuple):
    kind: str
    """`quoted`, `sign`, `bare`, or `end`."""
    text: str
    at: int
    """Position of its first character, from 1."""


class _ParseError(Exception):
    """The parser cannot continue here; the error is recorded."""


class _TooManyErrors(Exception):
    """The maximum number of errors was found."""


class _RequirementParser:
    """Parses one text; continues after an error, to find the others too."""

    def __init__(self, known: frozenset[str]) -> None:
        self.errors: list[str] = []
        self._known = known
        self._at = 0
        self._terms = 0
        self._tokens: list[_Token] = []

    def _split(self, text: str) -> Iterable[_Token]:
        """Yield the tokens of a text, the last one of kind `end`."""
        for match in _TOKEN.finditer(text.rstrip()):
            kind = str(match.lastgroup)
            value, at = match[kind], match.start(kind) + 1
            if kind == "unknown":
                if value == '"':
                    self._record(at, 'the quotation mark is not closed: end the word with "')
                    break
                self._record(
                    at, f"{value!r} has no meaning here; words with it need quotation marks"
                )
            elif kind == "quoted":
                yield _Token(kind, re.sub(r"\\(.)", r"\1", value[1:-1], flags=re.DOTALL), at)
            else:
                yield _Token(kind, value, at)
        yield _Token("end", "", len(text) + 1)

    def parse_all(self, text: str) -> Term | None:
        """Parse all of the text, or raise `_TooManyErrors`."""
        self._tokens = list(self._split(text))
        if len(self._tokens) == 1:
            if not self.errors:
                self.errors.append("it is empty; write a requirement such as gpus >= 1")
            return None
        term = self._because(self._any_of(0))
        while (token := self._token).kind != "end":
            if token.text == ")":
                self._record(token.at, "this ) has no opening parenthesis; remove it")
                self._at += 1
            else:
                self._record(
                    token.at, f"{_token_text(token)} has no operand; join requirements by and, or"
                )
                self._skip()
            if self._token.kind != "end":
                if self._token.text in ("and", "or"):
                    self._at += 1
                self._any_of(0)
        return term

    def _because(self, term: Term | None) -> Term | None:
        """Parse the reason that may follow a whole requirement."""
        if not self._is("because"):
            return term
        self._at += 1
        reason = self._next()
        if reason.kind != "quoted" or not reason.text.strip():
            found = _token_text(reason)
            self._record(reason.at, f"a reason in quotation marks is expected, not {found}")
            return None
        return None if term is None else Because(term, reason.text)

    @property
    def _token(self) -> _Token:
        return self._tokens[self._at]

    def _next(self) -> _Token:
        token = self._token
        if token.kind != "end":
            self._at += 1
        return token

    def _is(self, word: str) -> bool:
        token = self._token
        return token.kind != "quoted" and token.text == word

    def _any_of(self, depth: int) -> Term | None:
        return self._joined("or", depth)

    def _joined(self, word: str, depth: int) -> Term | None:
        """Parse terms that are joined by `or`, or by `and`."""
        inner = self._all_of if word == "or" else self._term_or_skip
        terms = [inner(depth)]
        while self._is(word):
            self._at += 1
            terms.append(inner(depth))
        found = tuple(term for term in terms if term is not None)
        if len(found) < len(terms):
            return None  # errors are recorded
        if len(found) == 1:
            return found[0]
        return AnyOf(found) if word == "or" else AllOf(found)

    def _all_of(self, depth: int) -> Term | None:
        return self._joined("and", depth)

    def _term_or_skip(self, depth: int) -> Term | None:
        """Parse a term; after an error skip it."""
        try:
            return self._term(depth)
        except _ParseError:
            self._skip()
            return None

    def _skip(self) -> None:
        """Skip to where the next requirement may begin."""
        open_ = 0
        while (token := self._token).kind != "end":
            if token.kind != "quoted":
                if open_ == 0 and token.text in ("and", "or", ")", "because"):
                    return
                open_ += (token.text == "(") - (token.text == ")")
            self._at += 1

    def _term(self, depth: int) -> Term | None:
        token = self._next()
        if depth > MAX_DEPTH:
            raise self._fatal(token.at, f"it is nested deeper than {MAX_DEPTH} levels")
        if token.kind == "bare" and token.text == "not":
            return _not(self._term(depth + 1))
        if token.kind == "sign" and token.text == "(":
            term = self._any_of(depth + 1)
            if not self._is(")"):
                where = self._token.at
                raise self._fatal(where, f"the ( at character {token.at} is not closed")
            self._at += 1
            return term
        return self._comparison(token)

    def _comparison(self, token: _Token) -> Term | None:
        """Parse a property, its operator and its operand."""
        self._terms += 1
        if self._terms > MAX_TERMS:
            raise self._fatal(token.at, f"it has more than {MAX_TERMS} comparisons")
        before = len(self.errors)
        if token.kind != "bare" or token.text in KEYWORDS:
            raise self._fatal(token.at, f"a property is expected, not {_token_text(token)}")
        name = token.text
        self._check_property(token)
        operator = self._next()
        if operator.kind == "bare" and operator.text == "not":
            operator = self._next()
            if operator.text not in ("in", "exists") or operator.kind == "quoted":
                found = _token_text(operator)
                reason = f"after `{name} not`, in or exists is expected, not {found}"
                raise self._fatal(operator.at, reason)
            made = _not(self._operand(name, operator, operator.text))
        elif operator.kind == "sign" and operator.text == "!=":
            made = _not(self._operand(name, operator, "="))
        elif operator.text in _OPERATORS and operator.kind != "quoted":
            made = self._operand(name, operator, operator.text)
        else:
            raise self._fatal(operator.at, self._no_operator(name, operator))
        return None if len(self.errors) > before else made

    def _no_operator(self, name: str, operator: _Token) -> str:
        listed = "=, !=, <, <=, >, >=, in, not in or exists"
        if operator.text in _OTHER_OPERATORS:
            return f"write {_OTHER_OPERATORS[operator.text]} instead of {operator.text}"
        return f"after `{name}` an operator is expected ({listed}), not {_token_text(operator)}"

    def _operand(self, name: str, operator: _Token, sign: str) -> Term | None:
        """Parse what follows an operator, and return the comparison."""
        if sign == "exists":
            return Exists(name)
        if name.startswith(CAPABILITY):
            reason = f"{name} is present or absent: use exists or not exists"
            raise self._fatal(operator.at, reason)
        if sign == "in":
            values = self._list()
            if name in NUMBERS:
                alike = [self._compare(name, "=", value) for value in values]
                found = tuple(term for term in alike if term is not None)
                return AnyOf(found) if len(found) > 1 else next(iter(found), None)
            return In(name, frozenset(value.text for value in values))
        value = self._value()
        if sign == "=" and name not in NUMBERS:
            return In(name, frozenset({value.text}))
        if name in TEXTS or name in OF_RECORDS:
            listed = "=, !=, in, not in or exists"
            self._record(operator.at, f"{name} is a word without an order: use {listed}")
            return None
        return self._compare(name, sign, value)

    def _compare(self, name: str, sign: str, value: _Token) -> Term | None:
        if name in SIZES:
            try:
                return Compare(name, sign, float(size(value.text)))
            except InvalidInput as e:
                self._record(value.at, str(e))
                return None
        if not _NUMBER.fullmatch(value.text):
            self._record(value.at, f"{name} is compared with a number, not {_token_text(value)}")
            return None
        return Compare(name, sign, float(value.text))

    def _list(self) -> list[_Token]:
        opening = self._next()
        if opening.kind != "sign" or opening.text != "(":
            reason = f"in needs a list in parentheses, as in (a, b), not {_token_text(opening)}"
            raise self._fatal(opening.at, reason)
        values = [self._value()]
        while self._is(","):
            self._at += 1
            values.append(self._value())
        if not self._is(")"):
            at = self._token.at
            found = _token_text(self._token)
            raise self._fatal(at, f"a comma or ) is expected in the list, not {found}")
        self._at += 1
        return values

    def _value(self) -> _Token:
        token = self._token
        if token.kind == "quoted" or (token.kind == "bare" and token.text not in KEYWORDS):
            if not token.text:
                self._record(token.at, "the word is empty; for an absent property use not exists")
            return self._next()
        hint = "; put it in quotation marks" if token.text in KEYWORDS else ""
        raise self._fatal(token.at, f"a value is expected, not {_token_text(token)}{hint}")

    def _check_property(self, token: _Token) -> None:
        if reason := why_unknown(token.text, self._known, _token_text(token)):
            self._record(token.at, reason)

    def _record(self, at: int, reason: str) -> None:
        """Record an error; raise `_TooManyErrors` if it is the last one that is listed."""
        self.errors.append(f"at character {at}: {reason}")
        if len(self.errors) >= MAX_ERRORS:
            raise _TooManyErrors

    def _fatal(self, at: int, reason: str) -> _ParseError:
        """Record an error, and return the exception that ends the present term."""
        self._record(at, reason)
        return _ParseError()


def why_unknown(name: str, known: frozenset[str] = FOR_JOBS, shown: str = "") -> str:
    """Return why a word is not an allowed property, with a suggestion; empty: it is allowed."""
    if name in known:
        return ""
    named = shown or repr(name if len(name) <= 2 * _GUESSED_CHARS else f"{name[:40]}…")
    if name.startswith(LABEL):
        if _LABEL_NAME.fullmatch(name.removeprefix(LABEL)):
            return ""
        return f"{named} is not a label: label. and up to 63 of a-z, 0-9, - _ and dots"
    if name.startswith(CAPABILITY):
        if _LABEL_NAME.fullmatch(name.removeprefix(CAPABILITY)):
            return ""
        return f"{named} is not a capability: `twinectl machine show` lists those of a machine"
    if name in OF_RECORDS:
        return f"{name} changes while tasks run: only `machine list --where` can use it"
    likely = [*known, LABEL + name] if len(name) <= _GUESSED_CHARS else []
    near = get_close_matches(name, likely, 1)
    guess = f"did you mean {near[0]}? " if near else ""
    listed = ", ".join(sorted(known))
    more = "label.NAME, capability.NAME"
    return f"{named} is not a property; {guess}known: {listed}, {more}"


def _not(term: Term | None) -> Term | None:
    return None if term is None else Not(term)


_OPERATORS = frozenset({"=", "<", "<=", ">", ">=", "in", "exists"})


def _token_text(token: _Token) -> str:
    if token.kind == "end":
        return "the end"
    return repr(token.text if len(token.text) <= 40 else f"{token.text[:40]}…")
