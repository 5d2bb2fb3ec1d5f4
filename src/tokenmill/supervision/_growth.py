"""Decide whether what a chat template makes can only grow with the number of its loops' passes.

Counting every operation (`_limits.py`) takes half of the time of a rendering. Nearly all templates need less: if no
operation makes more than a few times what it is given, it is enough to count the passes of loops, and to look at the
size of what is kept from one pass to the next. That holds for a template

- whose filters, methods and operators do not multiply (no `center`, no `*`, no `join` of anything by anything), and
- in which no value is made of itself twice, also not by way of others: `{% set a = a + a %}`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jinja2 import nodes

__all__ = ["grows_with_passes"]

MOST_GROWTH = 1000
"""How many times the size of its inputs a value may have, over all assignments that lead to it."""
MOST_ALTERNATIVES = 32
MOST_INDENT = 8
MOST_LENGTHENING = 16
LENGTHENING = {"capitalize", "e", "escape", "join", "list", "replace", "title", "tojson", "upper"}
"""Filters and methods whose result may be longer than what they are given."""
FILTERS = {
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int", "items", "join",
    "last", "length", "list", "lower", "map", "reject", "rejectattr", "replace", "reverse", "safe", "select",
    "selectattr", "string", "title", "tojson", "trim", "upper",
}  # fmt: skip
METHODS = {
    "capitalize", "count", "endswith", "find", "get", "index", "isdigit", "isspace", "items", "join", "keys", "lower",
    "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rpartition", "rsplit", "rstrip",
    "split", "splitlines", "startswith", "strip", "title", "upper", "values",
}  # fmt: skip
FUNCTIONS = {"namespace", "raise_exception", "strftime_now", "tokenmill_tag"}
MOST_PASSES = 1000
"""The largest number in a `range`."""
OPAQUE: Any = (nodes.Mul, nodes.Pow, nodes.CallBlock, nodes.FilterBlock, nodes.Block, nodes.Include, nodes.Import)
NO_TEXT = (nodes.Compare, nodes.Test, nodes.Not, nodes.Const, nodes.TemplateData)

Alternatives = list[Counter[str]]
"""How often a value is made of each other value, for each of the ways through the conditions of the template."""


def grows_with_passes(tree: nodes.Template) -> bool:
    """Whether a template can be rendered with only its passes counted."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    return (
        not any(True for _ in tree.find_all(OPAQUE))
        and all(map(_is_mild_filter, tree.find_all(nodes.Filter)))
        and all(map(_is_mild_loop, tree.find_all(nodes.For)))
        and all(_is_mild_call(call, macros) for call in _calls_but_ranges(tree))
        and all(map(_is_of_numbers, tree.find_all(nodes.Mod)))
        and _Assignments(tree, macros).most_growth() <= MOST_GROWTH
    )


def _are_constant(arguments: Iterable[Any]) -> bool:
    return all(isinstance(one.value if isinstance(one, nodes.Keyword) else one, nodes.Const) for one in arguments)


def _is_mild_filter(node: nodes.Filter) -> bool:
    if node.name not in FILTERS or node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if node.name == "tojson":
        numbers = [one.value.value for one in node.kwargs if isinstance(one.value, nodes.Const)]
        return (
            len(numbers) == len(node.kwargs)
            and not node.args
            and all(not isinstance(one, int) or one <= MOST_INDENT for one in numbers)
        )
    if node.name in ("join", "replace"):
        return not node.kwargs and _is_mild_text(node.name, node.args)
    selects = ("map", "select", "reject", "selectattr", "rejectattr")
    return node.name not in selects or _are_constant([*node.args, *node.kwargs])


def _is_mild_loop(node: nodes.For) -> bool:
    """Whether the range of a loop is no longer than the data."""
    constants = [one.value for one in node.iter.find_all(nodes.Const) if isinstance(one.value, (int, float))]
    return not node.recursive and all(abs(one) <= MOST_PASSES for one in constants)


def _calls_but_ranges(tree: nodes.Template) -> list[nodes.Call]:
    """Return all calls but those of `range` that a loop goes through."""
    ranges = [id(loop.iter) for loop in tree.find_all(nodes.For) if _is_range(loop.iter)]
    return [call for call in tree.find_all(nodes.Call) if id(call) not in ranges]


def _is_range(node: Any) -> bool:
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "range"


def _is_mild_call(node: nodes.Call, macros: dict[str, nodes.Macro]) -> bool:
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    called = node.node
    if isinstance(called, nodes.Name):
        return called.name in FUNCTIONS or called.name in macros
    if not isinstance(called, nodes.Getattr) or called.attr not in METHODS:
        return False
    if called.attr == "join":
        return _is_mild_text("join", [called.node])
    return called.attr != "replace" or _is_mild_text("replace", node.args)


def _is_mild_text(name: str, arguments: list[Any]) -> bool:
    """Whether a constant separator is short, or a replacement is not much longer than what it replaces."""
    values = [one.value for one in arguments if isinstance(one, nodes.Const)]
    if len(values) < len(arguments) or not all(isinstance(one, str) for one in values[:2]):
        return False
    if name == "join":
        return all(len(one) <= MOST_LENGTHENING for one in values)
    return len(values) > 1 and bool(values[0]) and len(values[1]) <= MOST_LENGTHENING * len(values[0])


def _is_of_numbers(node: nodes.Mod) -> bool:
    """Whether `left % right` cannot be a string that formats values."""

    def is_number(one: Any) -> bool:
        if isinstance(one, (nodes.Add, nodes.Sub)):
            return is_number(one.left) and is_number(one.right)
        if isinstance(one, nodes.Filter):
            return one.name in ("length", "count", "int")
        if isinstance(one, nodes.Getattr):
            return getattr(one.node, "name", "") == "loop" and one.attr.startswith(("index", "revindex"))
        return isinstance(one, nodes.Const) and isinstance(one.value, int)

    return is_number(node.left) and is_number(node.right)


class _Assignments:
    """Which values each value is made of, and how often; values are names and macros.

    A namespace is one value, whatever is in it. Names that a macro sets, and its parameters, are its own. What is set
    in the body of a loop is forgotten after the pass, so only namespaces and macros that call themselves can grow with
    every pass; other values grow once for each assignment in the template.
    """

    def __init__(self, tree: nodes.Template, macros: dict[str, nodes.Macro]) -> None:
        self._macros = macros
        self._made_of: dict[str, list[Alternatives]] = {}
        self._lasting = {node.name for node in tree.find_all(nodes.NSRef)} | {f"{name}()" for name in macros}
        self._local = {
            name: {one.name for one in macro.find_all(nodes.Name) if one.ctx in ("store", "param")}
            for name, macro in macros.items()
        }
        for name, macro in macros.items():
            self._lasting |= {self._qualified(parameter.name, name) for parameter in macro.args}
        self._collect(tree, "")

    def _collect(self, node: Any, scope: str) -> None:
        if isinstance(node, nodes.Macro):
            scope = node.name
            self._add(f"{scope}()", node.body, scope)
            for parameter in node.args:
                self._made_of.setdefault(self._qualified(parameter.name, scope), [])
        elif isinstance(node, (nodes.Assign, nodes.AssignBlock, nodes.For)):
            made_of = [node.node] if isinstance(node, nodes.Assign) else node.body
            if isinstance(node, nodes.For):
                made_of = [node.iter]
            for target in _targets(node.target):
                self._add(self._qualified(target, scope), made_of, scope)
        elif isinstance(node, nodes.Call) and getattr(node.node, "name", "") in self._macros:
            called = self._macros[getattr(node.node, "name", "")]
            for argument in [*node.args, *(keyword.value for keyword in node.kwargs)]:
                for parameter in called.args:
                    self._add(self._qualified(parameter.name, called.name), [argument], scope)
        for child in node.iter_child_nodes():
            self._collect(child, scope)

    def _qualified(self, name: str, scope: str) -> str:
        return f"{scope}:{name}" if name in self._local.get(scope, ()) else name

    def _add(self, name: str, made_of: list[Any], scope: str) -> None:
        self._made_of.setdefault(name, []).append(self._values_in_all(made_of, scope))

    def _values_in_all(self, some: Iterable[Any], scope: str) -> Alternatives:
        counted: Alternatives = [Counter()]
        for node in some:
            found = self._values_in(node, scope)
            if found != [Counter()]:
                counted = _least([one + other for one in counted for other in found])
        return counted

    def _values_in(self, node: Any, scope: str) -> Alternatives:
        """Count the values that a node may copy, for each of the ways through it."""
        if isinstance(node, (*NO_TEXT, nodes.Assign, nodes.AssignBlock)):
            return [Counter()]
        if isinstance(node, nodes.Name):
            return [Counter([self._qualified(node.name, scope)])]
        if isinstance(node, nodes.Filter) and node.name in ("length", "count"):
            return [Counter()]
        if isinstance(node, nodes.Getitem):
            return self._values_in(node.node, scope)
        if isinstance(node, nodes.Call) and getattr(node.node, "name", "") in self._macros:
            return [Counter([f"{getattr(node.node, 'name', '')}()"])]
        if isinstance(node, nodes.If):
            branches: list[list[Any]] = [node.body, node.else_, *([branch] for branch in node.elif_)]
        elif isinstance(node, (nodes.CondExpr, nodes.And, nodes.Or)):
            parts = (node.expr1, node.expr2) if isinstance(node, nodes.CondExpr) else (node.left, node.right)
            branches = [[part] for part in parts if part is not None]
        elif isinstance(node, nodes.For):
            branches = [node.body]
        else:
            branches = [list(node.iter_child_nodes())]
        ways = _least([way for branch in branches for way in self._values_in_all(branch, scope)])
        # What becomes longer counts as if it were there twice.
        name = node.name if isinstance(node, nodes.Filter) else getattr(getattr(node, "node", None), "attr", "")
        is_longer = name in LENGTHENING and isinstance(node, (nodes.Filter, nodes.Call))
        return [way + way for way in ways] if is_longer else ways

    def most_growth(self) -> float:
        """Return how many times larger than its inputs a value may become; endless if it is made of itself twice."""
        known = {
            name: [[Counter({k: n for k, n in way.items() if k in self._made_of}) for way in ways] for ways in found]
            for name, found in self._made_of.items()
        }
        reached = {name: _reach(name, known) for name in known}
        growth: dict[str, float] = {}
        for name in sorted(known, key=lambda name: len(reached[name])):
            cycle = {other for other in reached[name] if name in reached[other]}
            own = [
                max(sum(way[other] for other in cycle) for way in ways) for member in cycle for ways in known[member]
            ]
            if cycle & self._lasting and max(own) > 1:
                return float("inf")
            outside = [
                sum(n * growth.get(k, 1) for k, n in way.items() if k not in cycle)
                for ways in known[name]
                for way in ways
            ]
            growth[name] = max([1.0, *outside]) * math.prod(max(1, count) for count in own)
        return max(growth.values(), default=1)


def _least(ways: Alternatives) -> Alternatives:
    """Leave out ways that copy no more than another does; if too many are left, make one that copies as much as all."""
    kept: Alternatives = []
    for way in sorted(ways, key=Counter.total, reverse=True):
        if not any(way <= other for other in kept):
            kept.append(way)
    if len(kept) > MOST_ALTERNATIVES:
        most: Counter[str] = Counter()
        for way in kept:
            most |= way
        return [most]
    return kept


def _targets(target: Any) -> list[str]:
    if isinstance(target, (nodes.Name, nodes.NSRef)):
        return [target.name]
    return [name for item in target.items for name in _targets(item)]


def _reach(name: str, made_of: dict[str, list[Alternatives]]) -> set[str]:
    """Return all values that a value is made of, in any number of steps."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = {one for ways in made_of[waiting.pop()] for way in ways for one in way} - found
        found |= new
        waiting += new
    return found
