"""A Jinja sandbox in which a chat template cannot loop for minutes or fill the memory.

Jinja's own sandbox keeps a template away from the machine, but nested loops, `"%1000000000d" % 1` or a list that holds
itself twice, forty times over, need no access to anything. So a rendering has a budget: each pass through a body costs
as many steps as the body has parts, each operation costs steps by the size of its operands, and no value may be larger
than a multiple of the conversation. What an operation would make is computed before it is done.

Limits count and never look at a clock. Whether a template is refused depends on the template and the conversation, not
on the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.environment import Template
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokenmill.errors import UsageError
from tokenmill.supervision._counted_nodes import Counting

__all__ = ["CALL_NAMES", "STEPS_OF_A_PASS", "LimitedEnvironment", "TemplateLimit"]

MOST_SOURCE = 1 << 18
"""Characters of a template; the longest of a known model has 30,000."""
STEPS, STEPS_PER_CHARACTER = 2_000_000, 50
STEPS_OF_A_PASS = 20
"""A usual template takes some thousand steps; two million take half a second at most."""
CHARACTERS, CHARACTERS_PER_CHARACTER = 1 << 20, 16
"""The size of a value or of the text."""
MOST_BITS = 1 << 14
ITEM = 8
"""What an item of a list counts, in characters: a pointer has 8 bytes."""
UNLIMITED = 1 << 62
CALL_NAMES = ("_loop_vars", "_block_vars")
"""What Jinja passes with each call, besides what the template passes."""
_DIGITS = re.compile(r"\d+")
_SHALLOW_FILTERS = {"select", "reject", "selectattr", "rejectattr", "map", "list", "batch", "slice", "items", "reverse"}
_QUICK_FILTERS = {"join", "replace", "string", "trim", "upper", "lower", "safe", "center", "format", "escape", "e"}
_PLAIN_FILTERS = {"trim", "string", "upper", "lower", "safe"}
_PLAIN_METHODS = {"startswith", "endswith", "strip", "lstrip", "rstrip", "find", "rfind", "upper", "lower"}
"""Of strings; what they make is not much longer."""
_SORTING_FILTERS = {"sort", "unique", "groupby", "dictsort", "min", "max"}
_CHEAP_TESTS = {
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "true", "false", "number",
    "integer", "float", "callable", "sameas", "filter", "test", "odd", "even",
}  # fmt: skip
_LEFT_OUT_FILTERS = ("random", "urlize", "pprint")
"""One gives another result each time; the others take time that is not proportional to their text."""


class TemplateLimit(UsageError):
    """A rendering that takes too long or grows too large; it ends the run, because others will be like it."""


def _refuse(what: str) -> NoReturn:
    raise TemplateLimit(
        f"the chat template {what} for one conversation; look in it for loops inside loops, for widths and for values "
        "that double, or pass another with --chat-template FILE"
    )


class _Budget:
    """What one rendering may still do. The conversation is measured only if the least budget is not enough."""

    def __init__(self, inputs: list[Any]) -> None:
        self._inputs: list[Any] | None = inputs
        self._sizes: dict[int, tuple[Any, int, int]] = {}
        self.most_characters = self.num_unwritten = CHARACTERS
        self.num_steps = self.steps_left = STEPS

    def spend(self, steps: int) -> None:
        """Count steps."""
        self.steps_left -= steps
        if self.steps_left < 0 and not (self._extend() and self.steps_left >= 0):
            _refuse(f"takes more than {self.num_steps:,} steps")

    def write(self, size: int) -> None:
        """Count characters of the text."""
        self.num_unwritten -= size
        if self.num_unwritten < 0 and not (self._extend() and self.num_unwritten >= 0):
            _refuse(f"writes more than {self.most_characters:,} characters")

    def allow(self, size: int) -> None:
        """Refuse a value of this size."""
        if size > self.most_characters and not (self._extend() and size <= self.most_characters):
            _refuse(f"makes a value of more than {self.most_characters:,} characters")

    def _extend(self) -> bool:
        """Add what the size of the conversation allows, once."""
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            return False
        self.most_characters = UNLIMITED
        size = self.measure(inputs)[0]
        more = CHARACTERS_PER_CHARACTER * size
        self.most_characters, self.num_unwritten = CHARACTERS + more, self.num_unwritten + more
        self.num_steps, self.steps_left = (
            STEPS + STEPS_PER_CHARACTER * size,
            self.steps_left + STEPS_PER_CHARACTER * size,
        )
        return True

    def size(self, value: Any) -> int:
        """Count the characters of a value, and of all inside it as often as it is there."""
        if isinstance(value, str):
            return str.__len__(value)
        return self.measure(value)[0]

    def note(self, value: Any) -> Any:
        """Count a value that an operation made."""
        size = self.size(value)
        self.allow(size)
        self.spend(1 + (size >> 3))
        return value

    def measure(self, value: Any, seen: dict[int, tuple[int, int]] | None = None) -> tuple[int, int]:
        """Return the size and the depth of a value; lists and objects cannot be changed, so theirs are kept."""
        if isinstance(value, (str, bytes)):
            return (str.__len__(value) if isinstance(value, str) else len(value)), 0
        if isinstance(value, int):
            if value.bit_length() > MOST_BITS:
                _refuse(f"makes a number of more than {MOST_BITS:,} bits")
            return 1 + value.bit_length() // 3, 0
        if isinstance(value, range):
            return ITEM * len(value), 1
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1:]
        items = _items_of(value)
        if items is None:
            return ITEM, 0
        # A namespace can be changed; within one measurement it cannot, and one that holds itself counts once.
        seen = {} if seen is None else seen
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = ITEM, 0
        size, depth, is_constant = ITEM, 0, isinstance(value, (list, tuple, dict))
        for item in items:
            own, below = (len(item), 0) if type(item) is str else self.measure(item, seen)
            size, depth = size + ITEM + own, max(depth, below)
            is_constant = is_constant and (type(item) is str or _items_of(item) is None or id(item) in self._sizes)
            self.allow(size)
        seen[id(value)] = size, depth + 1
        if is_constant:
            self._sizes[id(value)] = value, size, depth + 1
        return size, depth + 1


def _items_of(value: Any) -> Iterable[Any] | None:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, Namespace):
        return [one for pair in object.__getattribute__(value, "_Namespace__attrs").items() for one in pair]
    return value if isinstance(value, (list, tuple, KeysView, ValuesView, ItemsView)) else None


def _grown(budget: _Budget, name: str, value: Any, arguments: list[Any]) -> int:
    """Return at least the size of what a filter or method makes of a value."""
    size = budget.size(value)
    numbers = sum(abs(one) for one in arguments if isinstance(one, int))
    strings = sum(budget.size(one) for one in arguments if not isinstance(one, int))
    if name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
        return size + numbers
    if name == "expandtabs":
        return size + (numbers or 8) * size
    if name == "indent":
        return size + (4 + numbers + strings) * (1 + (str.count(value, "\n") if isinstance(value, str) else size))
    if name in ("batch", "slice"):
        return size + ITEM * numbers
    if name == "replace":
        return _replaced(budget, size, value, arguments)
    if name == "join":
        return size + strings + budget.size(arguments[0] if arguments else "") * (size // ITEM + 1)
    if name == "tojson":
        return size * 6 + size * (numbers + strings) * (1 + budget.measure(value)[1])
    if name in ("wordwrap", "translate"):
        return size * (1 + strings)
    if name in ("list", "split", "rsplit", "splitlines") and isinstance(value, (str, bytes)):
        return size * ITEM
    if name in ("escape", "e", "forceescape", "xmlattr"):
        return size * 6
    if name == "round":
        return numbers if numbers <= 400 else UNLIMITED
    return size + strings


def _replaced(budget: _Budget, size: int, value: Any, arguments: list[Any]) -> int:
    old, new = (*arguments, "", "")[:2]
    length = budget.size(old)
    if isinstance(value, str) and type(old) is str and old:
        return size + str.count(value, old) * budget.size(new)
    return size + (size // (length or 1) + 1) * budget.size(new)


def _formatted(budget: _Budget, form: str, mark: str, values: Any) -> int:
    """Return at least the size of a formatted text; `mark` is `%` or `{`."""
    count = str.count(form, mark)
    widths = sum(UNLIMITED if len(digits) > 9 else int(digits) for digits in _DIGITS.findall(form))
    if "*" in form or "{" in form.partition(":")[2]:
        flat = values if isinstance(values, (list, tuple)) else [values]
        flat = [*flat, *(inner for one in flat if isinstance(one, dict) for inner in one.values())]
        widths += count * sum(abs(one) for one in flat if isinstance(one, int))
    return str.__len__(form) + widths + count * 2 * budget.size(values)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates render within a budget. One thread may use it at a time."""

    cheap_filters = frozenset(["length", "count", "default", "d", "first", "last"])
    """Filters whose work does not depend on the size of anything."""
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.budget = _Budget([])
        self.counts_all = True
        """Whether each operation is counted; if not, only what `keep` and the passes of loops tell."""
        self._are_limited = False
        del self.globals["lipsum"]
        for name in _LEFT_OUT_FILTERS:
            del self.filters[name]

    def parse(self, source: str, name: str | None = None, filename: str | None = None) -> nodes.Template:
        """Parse a template that is not too long and not nested too deeply."""
        if len(source) > MOST_SOURCE:
            raise UsageError(f"the chat template has {len(source):,} characters; expected at most {MOST_SOURCE:,}")
        if any("\ud800" <= character <= "\udfff" for character in source):
            raise UsageError("the chat template has half of a surrogate pair, which is no character; correct it")
        tree: nodes.Template = _compiling(lambda: super(LimitedEnvironment, self).parse(source, name, filename))
        return tree

    def from_string(self, source: Any, *arguments: Any, **options: Any) -> Template:
        """Compile a template."""
        compiled: Template = _compiling(
            lambda: super(LimitedEnvironment, self).from_string(source, *arguments, **options)
        )
        return compiled

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        """Put the counting into a template that is about to be compiled."""
        if not self.counts_all:
            self.intercepted_binops = frozenset()
            return super()._generate(source, *arguments, **options)
        if not self._are_limited:
            self._are_limited = True
            self.filters = {n: f if n in self.cheap_filters else self._limit(n, f) for n, f in self.filters.items()}
            self.tests = {n: t if n in _CHEAP_TESTS else self._limit(n, t) for n, t in self.tests.items()}
            self.filters |= {"_step": _step, "_out": _out, "_touch": _touch, "_note": _note, "_concat": _concat}
        tree = Counting().visit(source)
        tree.set_environment(self)
        return super()._generate(tree, *arguments, **options)

    def _limit(self, name: str, function: Any) -> Callable[..., Any]:
        """Return a filter or test that counts what it does; Jinja passes the context to it."""
        takes = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

        @pass_context
        def limited(context: Any, value: Any = "", /, *args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            if name in _PLAIN_FILTERS and type(value) is str and not args and not kwargs:
                budget.spend(1 + (len(value) >> 3))
                return function(value)
            arguments = [*args, *kwargs.values()]
            if name in ("join", "sum", "list") and _items_of(value) is None and not isinstance(value, (str, range)):
                value = list(value)
            if name == "format":
                grown = _formatted(budget, str(value), "%", arguments)
            else:
                grown = _grown(budget, name, value, arguments)
            budget.allow(grown)
            budget.spend(1 + _cost(budget, name, value, arguments, grown, is_quick=name in _QUICK_FILTERS))
            first = {"context": [context], "eval_context": [context.eval_ctx], "environment": [self]}.get(takes, [])
            return budget.note(function(*first, value, *args, **kwargs))

        return limited

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Do an arithmetic operation whose result is not too large."""
        budget = self.budget
        if operator == "+" and type(left) is str and type(right) is str:
            size = len(left) + len(right)
            budget.allow(size)
            budget.spend(1 + (size >> 3))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            grown = bits * right if operator == "**" else bits + right.bit_length() if operator == "*" else 0
            if bits > 1 and grown > MOST_BITS:
                _refuse(f"makes a number of more than {MOST_BITS:,} bits")
        elif operator == "*":
            count, value = (left, right) if isinstance(left, int) else (right, left)
            budget.allow(budget.size(value) * count if isinstance(count, int) else 0)
        elif operator == "%" and isinstance(left, (str, bytes)):
            form = left if isinstance(left, str) else left.decode("latin-1")
            budget.allow(_formatted(budget, form, "%", right))
        elif operator == "+" and not isinstance(left, float):
            budget.allow(budget.size(left) + budget.size(right))
        return budget.note(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in Jinja)
        """Call a method or macro whose result is not too large."""
        if not __self.counts_all:
            return super().call(__context, __obj, *args, **kwargs)
        budget, name = __self.budget, getattr(__obj, "__name__", "")
        owner = getattr(__obj, "__self__", None)
        if type(owner) is str and name in _PLAIN_METHODS:
            budget.spend(1 + (len(owner) >> 3))
            return super().call(__context, __obj, *args, **kwargs)
        arguments = [*args, *(value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars"))]
        owner = getattr(getattr(__obj, "__wrapped__", None), "__self__", owner)
        if isinstance(owner, (str, bytes, int)):
            if name == "join" and args:
                args = ([*args[0]], *args[1:])
                grown = _grown(budget, name, args[0], [owner])
            elif name in ("format", "format_map") and isinstance(owner, str):
                grown = _formatted(budget, owner, "{", arguments)
            else:
                grown = _grown(budget, name, owner, arguments)
            budget.allow(grown)
            budget.spend(1 + _cost(budget, name, owner, arguments, grown, is_quick=True))
        else:
            budget.spend(1 + sum(budget.size(one) >> 3 for one in arguments))
        return budget.note(super().call(__context, __obj, *args, **kwargs))


class _LimitedTemplate(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        """Render within a budget for these values."""
        environment: Any = self.environment
        environment.budget = _Budget([*args, *kwargs.values()])
        return super().render(*args, **kwargs)


LimitedEnvironment.template_class = _LimitedTemplate


def _compiling(work: Callable[[], Any]) -> Any:
    """Parse or compile; what Python itself cannot compile is an error of the template, too."""
    try:
        return work()
    except (RecursionError, SyntaxError, MemoryError):
        reason = "it is nested too deeply"
    except (ValueError, OverflowError) as error:
        reason = str(error).partition(";")[0]
    raise UsageError(f"the chat template is not valid: {reason}; pass another with --chat-template FILE")


def _cost(budget: _Budget, name: str, value: Any, arguments: list[Any], grown: int, *, is_quick: bool) -> int:
    """Return the steps of a filter or a method of a string."""
    size = budget.size(value) + sum(map(budget.size, arguments))
    if name in _SHALLOW_FILTERS:
        return (len(value) if hasattr(value, "__len__") else 0) + (size >> 6)
    if name == "striptags":
        return size * (1 + str(value).count("<"))
    if name == "sum":
        return size * (1 + (len(value) if arguments and not isinstance(arguments[-1], int) else 0))
    if name in _SORTING_FILTERS:
        return 4 * size
    return max(size, grown) >> 3 if is_quick else max(size, grown)


@pass_context
def _step(context: Any, steps: int) -> bool:
    context.environment.budget.spend(steps)
    return True


@pass_context
def _out(context: Any, value: Any) -> Any:
    budget = context.environment.budget
    budget.write(len(value) if type(value) is str else budget.size(value))
    return value


@pass_context
def _touch(context: Any, value: Any) -> Any:
    budget = context.environment.budget
    budget.spend((len(value) if type(value) is str else budget.size(value)) >> 3)
    return value


@pass_context
def _note(context: Any, value: Any) -> Any:
    return context.environment.budget.note(value)


@pass_context
def _concat(context: Any, *values: Any) -> Any:
    budget, rules = context.environment.budget, context.eval_ctx
    budget.allow(sum(map(budget.size, values)) * (6 if rules.volatile or rules.autoescape else 1))
    return budget.note((markup_join if rules.autoescape else str_join)(values))
