"""The language of `where`: comparisons of kept fields, parsed as Python and translated into an expression of pyarrow.

Nothing is evaluated as Python: the parser accepts the few kinds of syntax below and refuses all others. Fields are
strings in a store, so a comparison with a number reads the field as a number first.
"""

from __future__ import annotations

import ast
from itertools import pairwise
from typing import Any

from tokenmill.arguments import show
from tokenmill.errors import UsageError

__all__ = ["LENGTH", "Expression"]

LENGTH = "num_tokens"
"""The length of a document, which is in the index and can be used like a field."""
LONGEST = 10_000
LARGEST_EXACT = 1 << 53
HOW = "write, for example, \"score > 0.5 and lang in ['en', 'de']\""


class Expression:
    """A condition on documents: `fields` are the names that it uses, and `make` makes an expression of pyarrow."""

    def __init__(self, text: Any) -> None:
        if not isinstance(text, str) or not text.strip() or len(text) > LONGEST:
            raise UsageError(f"{show(text)} is not a condition on documents; {HOW}")
        self.text = text.strip()
        try:
            self._tree = ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            place = f" at character {error.offset}" if isinstance(error, SyntaxError) and error.offset else ""
            raise UsageError(f"the condition {show(text)} cannot be read{place}; {HOW}") from None
        self.fields: list[str] = []
        try:
            self._condition(self._tree, None)
        except RecursionError:
            raise UsageError(f"the condition {show(text)} is nested too deeply; {HOW}") from None

    def make(self, columns: dict[str, str]) -> Any:
        """Return the expression over the columns of these fields."""
        return self._condition(self._tree, columns)

    def _condition(self, node: ast.expr, columns: dict[str, str] | None) -> Any:
        """Translate a condition, or only check it if there are no columns."""
        if isinstance(node, ast.BoolOp):
            parts = [self._condition(value, columns) for value in node.values]
            found = parts[0]
            for part in parts[1:] if columns is not None else ():
                found = found & part if isinstance(node.op, ast.And) else found | part
            return found
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._condition(node.operand, columns)
            return None if columns is None else ~inner
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            found = None
            for operator, (left, right) in zip(node.ops, pairwise(operands), strict=True):
                part = self._compare(operator, left, right, columns)
                found = part if found is None else found & part
            return found
        if isinstance(node, ast.Call):
            return self._call(node, columns)
        raise self._refuse(node, "is not a condition")

    def _compare(self, operator: ast.cmpop, left: ast.expr, right: ast.expr, columns: Any) -> Any:
        name, value = self._field_of(left), None
        if isinstance(operator, (ast.In, ast.NotIn)):
            found = self._among(name, left, right, columns)
            return ~found if columns is not None and isinstance(operator, ast.NotIn) else found
        symbol = type(operator)
        if name is None:
            # 0.5 < score is score > 0.5
            name, left, right = self._field_of(right), right, left
            symbol = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}.get(symbol, symbol)
        if name is None:
            raise self._refuse(left, "is no field")
        if isinstance(operator, (ast.Is, ast.IsNot)):
            if not isinstance(right, ast.Constant) or right.value is not None:
                raise self._refuse(right, "is not None, which 'is' compares with")
            self._use(name)
            missing: Any = None if columns is None else self._column(name, columns).is_null()
            return ~missing if columns is not None and isinstance(operator, ast.IsNot) else missing
        value = self._value(right)
        self._use(name)
        if columns is None:
            return None
        column = self._column(name, columns, value)
        value = _as_stored(value)
        if symbol is ast.Eq:
            return column == value
        if symbol is ast.NotEq:
            return column != value
        if symbol in (ast.Lt, ast.LtE):
            return column < value if symbol is ast.Lt else column <= value
        return column > value if symbol is ast.Gt else column >= value

    def _among(self, name: str | None, left: ast.expr, right: ast.expr, columns: Any) -> Any:
        """Translate `lang in ['en', 'de']`, or `'wiki' in url`."""
        if name is None:
            inside, text = self._field_of(right), self._value(left)
            if inside is None or not isinstance(text, str):
                raise self._refuse(right, "is no field in which a text could be")
            self._use(inside)
            return columns and _pc().match_substring(self._column(inside, columns), text)
        if not isinstance(right, (ast.List, ast.Tuple, ast.Set)) or not right.elts:
            raise self._refuse(right, "is not a list of values")
        values = [self._value(element) for element in right.elts]
        if len({isinstance(value, str) for value in values}) > 1:
            raise self._refuse(right, "has both texts and numbers")
        self._use(name)
        if columns is None:
            return None
        column = self._column(name, columns, values[0])
        # A missing field is not among the values, nor is it outside of them.
        found = column.isin([_as_stored(value) for value in values])
        return _pc().if_else(column.is_null(), _unknown(), found)

    def _call(self, node: ast.Call, columns: Any) -> Any:
        """Translate `url.startswith('https')` and `url.endswith('.pdf')`."""
        method = node.func
        kinds = {"startswith": "starts_with", "endswith": "ends_with"}
        if not isinstance(method, ast.Attribute) or method.attr not in kinds or len(node.args) != 1 or node.keywords:
            raise self._refuse(node, "is no function of this language: there are startswith and endswith")
        name, value = self._field_of(method.value), self._value(node.args[0])
        if name is None or not isinstance(value, str):
            raise self._refuse(node, "does not compare a field with a text")
        self._use(name)
        return columns and getattr(_pc(), kinds[method.attr])(self._column(name, columns), value)

    def _field_of(self, node: ast.expr) -> str | None:
        """Return the name of a field, also one with dots, and `field('any name')`; None for anything else."""
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Attribute):
            before = self._field_of(node.value)
            return None if before is None else f"{before}.{node.attr}"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "field":
            return None
        name = node.args[0].value if len(node.args) == 1 and isinstance(node.args[0], ast.Constant) else None
        return name if isinstance(name, str) else None

    def _value(self, node: ast.expr) -> str | float | bool:
        value: Any = node.value if isinstance(node, ast.Constant) else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            inner: Any = node.operand.value
            value = -inner if type(inner) in (int, float) else None
        if not isinstance(value, (str, int, float)):
            raise self._refuse(node, "is not a text, a number, True or False")
        if isinstance(value, int) and abs(value) > LARGEST_EXACT:
            raise self._refuse(node, f"is too large to compare as a number; compare it as a text, '{value}'")
        found: str | float | bool = value
        return found

    def _use(self, name: str) -> None:
        if name not in self.fields:
            self.fields.append(name)

    def _column(self, name: str, columns: dict[str, str], value: Any = "") -> Any:
        """Return the column of a field, as numbers if it is compared with one."""
        import pyarrow as pa

        column = _pc().field(columns[name])
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return column.cast(pa.float64()) if is_number else column

    def _refuse(self, node: ast.AST, why: str) -> UsageError:
        piece = ast.get_source_segment(self.text, node) or self.text
        return UsageError(f"{show(piece)} {why}, in the condition {show(self.text)}; {HOW}")


def _as_stored(value: Any) -> Any:
    """Return a value as a store has it: JSON's words for True and False."""
    return str(value).lower() if isinstance(value, bool) else value


def _unknown() -> Any:
    """Return what a comparison with a missing field gives."""
    import pyarrow as pa

    return pa.scalar(None, pa.bool_())


def _pc() -> Any:
    import pyarrow.compute as pc

    return pc
