"""Parses the operands of a node in the text of a program: `%node`, `'text'`, `3`, `-` (None), and tuples of these."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from l2l_compile.errors import ParseError

MOST_DIGITS = 18  # of a count or an index: fits in 64 bits
_MOST_DEPTH = 8  # of tuples in tuples; a graph returns tuples in a tuple
_SHOWN = 60  # characters of a text in an error
STRING = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_TOKEN = re.compile(rf"\s*(?:%(?P<node>\w+)|(?P<string>{STRING})|(?P<number>\d+)|(?P<word>\w+)|(?P<mark>[(),=-]))", re.ASCII)


def shown(written: str) -> str:
    """A text for an error message: quoted, and cut if it is long."""
    return repr(written if len(written) <= _SHOWN else f"{written[:_SHOWN]}...")


def string_of(written: str, line: int) -> str:
    """The string of a Python string literal. Raises `ParseError` for one that Python does not accept."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an unknown escape such as '\\d' is a warning
            return ast.literal_eval(written)  # the literal is one token: nothing is executed
    except (SyntaxError, ValueError, Warning) as error:
        raise ParseError(line, f"cannot read the name {shown(written)}: {type(error).__name__}") from None


def count_of(digits: str, line: int) -> int:
    """The number of digits. Raises `ParseError` for a number that no count or index of a program has."""
    if len(digits) > MOST_DIGITS:
        raise ParseError(line, f"a number has {len(digits)} digits, more than the {MOST_DIGITS} that a size may have")
    return int(digits)


class Reader:
    """Parses the operands of a line. `node` returns the node of a name."""

    def __init__(self, written: str, line: int, node: Callable[[str], fx.Node]):
        self.line, self.node = line, node
        self.tokens = list(self._split(written.rstrip()))
        self.position, self.depth = 0, 0

    def _split(self, written: str) -> Iterator[tuple[str, str]]:
        position = 0
        while position < len(written):
            match = _TOKEN.match(written, position)
            if match is None:
                raise ParseError(self.line, f"cannot read {shown(written[position:])}")
            yield match.lastgroup or "", match[match.lastgroup or 0]
            position = match.end()

    def call(self) -> tuple[list, dict[str, Any]]:
        """The positional operands, and the operands with a name."""
        positional: list = []
        named: dict[str, Any] = {}
        while self._more():
            if self._peek()[0] == "word":
                _, name = self._next()
                self._expect("=")
                if name in named:
                    raise ParseError(self.line, f"the operand {shown(name)} is given twice")
                named[name] = self.value()
            else:
                positional.append(self.value())
            if self._more():
                self._expect(",")
        return positional, named

    def result(self) -> Any:
        """The only operand of a line."""
        found = self.value()
        if self._more():
            raise ParseError(self.line, f"nothing was expected before {shown(self._peek()[1])}")
        return found

    def value(self) -> Any:
        kind, written = self._next()
        if kind == "node":
            return self.node(written)
        if kind == "string":
            return string_of(written, self.line)
        if kind == "number":
            return count_of(written, self.line)
        if written == "-":
            return None
        if written == "(":
            return self._tuple()
        raise ParseError(self.line, f"expected an operand, got {shown(written)}")

    def _tuple(self) -> tuple:
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise ParseError(self.line, f"tuples are nested deeper than {_MOST_DEPTH}")
        found = []
        while self._more() and self._peek()[1] != ")":
            found.append(self.value())
            if self._more() and self._peek()[1] != ")":
                self._expect(",")
        self._expect(")")
        self.depth -= 1
        return tuple(found)

    def _more(self) -> bool:
        return self.position < len(self.tokens)

    def _peek(self) -> tuple[str, str]:
        return self.tokens[self.position] if self._more() else ("", "")

    def _next(self) -> tuple[str, str]:
        found = self._peek()
        self.position += 1
        return found

    def _expect(self, mark: str) -> None:
        if self._next()[1] != mark:
            raise ParseError(self.line, f"expected {mark!r}")
