"""Puts calls that count into the syntax tree of a chat template; `_limits.py` has what they call.

Jinja's sandbox asks before it calls or adds, but not before each pass of a loop, each comparison, slice and list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

__all__ = ["Counting"]

SHORT_DATA = 32
"""Shorter constants of a template are counted with the body, longer ones when they are written."""


class Counting(NodeTransformer):
    """Adds the filters above to a template: to bodies, to what is written, compared, cut, joined, and to lists."""

    def _bodied(self, node: Any) -> Any:
        cost = 1 + sum(1 + (len(one.data) if type(one) is nodes.TemplateData else 0) for one in _within(node))
        self.generic_visit(node)
        step = _filtered(nodes.Const(cost, lineno=node.lineno), "_step")
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        node.body = [nodes.ExprStmt(step, lineno=node.lineno), *node.body]
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _bodied  # noqa: N815

    def visit_Output(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [one if _is_short(one) else _filtered(_constant(one), "_out") for one in node.nodes]
        return node

    def visit_Compare(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        first, rest = node.expr, node.ops
        if not (len(rest) == 1 and rest[0].op not in ("in", "notin") and any(map(_is_constant, (first, rest[0].expr)))):
            node.expr = _touched(first)
            for operand in rest:
                operand.expr = _touched(operand.expr)
        return node

    def visit_Getitem(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_note") if isinstance(node.arg, nodes.Slice) else node

    def _listed(self, node: Any) -> Any:
        is_fixed = getattr(node, "ctx", "load") != "load" or all(map(_is_constant, getattr(node, "items", [])))
        self.generic_visit(node)
        return node if is_fixed else _filtered(node, "_note")

    visit_List = visit_Tuple = visit_Dict = _listed  # noqa: N815

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node.nodes[0], "_concat", node.nodes[1:])


def _within(node: Any) -> Iterable[Any]:
    """All parts of a body; those of bodies in it are counted there, too."""
    return node.find_all(nodes.Node)  # type: ignore[no-any-return]


def _is_constant(node: Any) -> bool:
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(map(_is_constant, node.items))
    return isinstance(node, nodes.Const)


def _is_short(node: Any) -> bool:
    return isinstance(node, nodes.TemplateData) and len(node.data) <= SHORT_DATA


def _constant(node: Any) -> Any:
    return nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node


def _touched(node: Any) -> Any:
    return node if _is_constant(node) else _filtered(node, "_touch")


def _filtered(node: Any, name: str, arguments: Iterable[Any] = ()) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)
