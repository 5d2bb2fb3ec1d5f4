"""Compile a chat template in a sandbox, so that its output says which message each character came from.

The environment offers what Transformers offers, except what would make the output depend on anything but the record:
`lipsum`, the filter `random`, and `strftime_now` unless a date is given.

Each `for` of the template is made to report the message that it gets to. So the text that a template writes for a
message is known, whatever it does with the messages after it.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.supervision._attributed import (
    Attributed,
    AttributedDict,
    AttributedList,
    Event,
    Guarded,
    Part,
    Unrecordable,
    attach,
    concat,
    join,
    parts_of,
)
from tokenmill.supervision._growth import grows_with_passes
from tokenmill.supervision._limits import CALL_NAMES, STEPS_OF_A_PASS, LimitedEnvironment
from tokenmill.supervision._template_json import Options, encode_json

__all__ = ["TAG", "CompiledTemplate", "TemplateRefused"]

Message = dict[str, Any]
OBJECTS = (dict, AttributedDict)
DICT_NAMES = frozenset(dir(AttributedDict()))
STRING_METHODS = frozenset(["endswith", "lstrip", "replace", "rstrip", "split", "startswith", "strip"])
"""Methods that a template may have without the sandbox looking at them."""
PROMPT = "add_generation_prompt"
_REACHED, _TAKEN, _TESTED, _KEPT = "tokenmill_reached", "tokenmill_taken", "tokenmill_tested", "tokenmill_kept"
_CONCAT, _ENDED, _IN, TAG = "tokenmill_concat", "tokenmill_ended", "tokenmill_in", "tokenmill_tag"
"""Names of functions and filters that are added to templates."""


class TemplateRefused(Exception):
    """The template rejects this conversation, or its rendering does not show the turns."""


class CompiledTemplate:
    """A Jinja template in a sandbox. `constants` are the values of names such as `bos_token`."""

    def __init__(self, source: str, constants: dict[str, Any], date: str | None = None) -> None:
        import jinja2

        self._constants = constants
        self._numbers: dict[int, int] = {}
        self._date = date
        self._records_json: Callable[[Any, Options], Any] | None = None
        self.environment = environment = _environment(date)
        environment.filters |= {"tojson": self._to_json, _REACHED: self._mark_message, _TAKEN: self._mark_taken}
        environment.filters |= {_TESTED: self._test, _KEPT: self._keep}
        try:
            tree, self.source_tree = environment.parse(source), environment.parse(source)
            self.has_tags = any(call.node.name == TAG for call in _calls_by_name(tree))
            self.has_constant_tail, self.asks_after_loop_only = _find_prompt(tree)
            environment.counts_all = not grows_with_passes(tree)
            _report_loops(tree, itertools.count())
            _replace_operators(tree)
            self._template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UsageError(
                f"the chat template is not valid: {error}; pass another with --chat-template FILE"
            ) from None

    def render(self, messages: list[Message], prompt: bool, tools: Any = None) -> Attributed:
        """Render messages, with or without the generation prompt."""
        import jinja2

        self._numbers = {id(message): number for number, message in enumerate(messages)}
        named = {"messages": messages, "tools": tools, "documents": None, PROMPT: prompt}
        try:
            text: Attributed = self._template.render(**{**self._constants, **named})
            return text
        except (TemplateRefused, Unrecordable, UsageError):
            raise
        except jinja2.UndefinedError as error:
            if "strftime_now" in str(error) and self._date is None:
                raise UsageError(
                    "the chat template calls strftime_now, so its text would depend on the day; pass the date that it "
                    "should write, --template-date 2026-01-31"
                ) from None
            raise _cannot_render(error) from None
        except Exception as error:
            # Any error of a template rejects the record that it renders.
            raise _cannot_render(error) from None

    def record(self, to_json: Callable[[Any, Options], Any] | None) -> None:
        """Let a recorder follow the next renderings, or no more; it decides what a value becomes as JSON."""
        self._records_json, self.environment.records = to_json, to_json is not None

    def _mark_message(self, value: Any, loop: int) -> str:
        """Count a pass of a loop, and say that it has reached a message, if the value is one."""
        self.environment.budget.spend(STEPS_OF_A_PASS)
        number = self._numbers.get(id(value))
        return "" if number is None else attach("", [Part(0, 0, Event("begin", loop, number))])

    def _mark_taken(self, values: Any, place: Any, loop: int) -> str:
        """Say that a loop over places has reached a message, if it takes one from a list."""
        is_inside = type(values) is list and type(place) is int and 0 <= place < len(values)
        number = self._numbers.get(id(values[place])) if is_inside else None
        return "" if number is None else attach("", [Part(0, 0, Event("begin", loop, number))])

    def _test(self, value: Any) -> bool:
        """Count a value that the condition of a loop is asked about."""
        self.environment.budget.spend(STEPS_OF_A_PASS)
        return True

    def _keep(self, value: Any) -> Any:
        """Look at the size of a value that a namespace keeps from one pass of a loop to the next."""
        if isinstance(value, str):
            self.environment.budget.allow(str.__len__(value))
        return value

    def _to_json(
        self, value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
    ) -> str:
        """Encode a value, and keep its source."""
        separators = tuple(separators) if separators is not None else None
        options = Options(ensure_ascii, indent, separators, sort_keys)
        recorded = self._records_json(value, options) if self._records_json is not None else None
        if recorded is not None:
            return recorded  # type: ignore[no-any-return]
        text = encode_json(value, options)
        if isinstance(value, (AttributedDict, AttributedList)):
            return attach(text, [Part(0, len(text), value._source)])
        sources = {part.what for part in parts_of(value)} if isinstance(value, str) else set()
        return attach(text, [Part(0, len(text), sources.pop())]) if len(sources) == 1 else text


def _cannot_render(error: Exception) -> TemplateRefused:
    return TemplateRefused(f"the chat template cannot render it: {type(error).__name__}: {error}")


def _environment(date: str | None) -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.runtime import LoopContext
    from jinja2.utils import Namespace

    class Generation(Extension):
        """`{% generation %}` marks text of the assistant."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            opening, closing = (_output(TAG, jinja2.nodes.Const(kind), line=line) for kind in ("open", "close"))
            return [opening, *body, closing]

    class Environment(LimitedEnvironment):
        records = False
        """Whether a recorder follows the rendering."""
        cheap_filters = LimitedEnvironment.cheap_filters | {_REACHED, _TAKEN, _TESTED, _KEPT, _IN}

        def getattr(self, obj: Any, attribute: str) -> Any:
            # A third of a rendering is looking up fields of messages, because the sandbox first looks for methods of
            # these names, and checks whether they are safe.
            if type(obj) in OBJECTS and attribute not in DICT_NAMES:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
            if type(obj) in (LoopContext, Namespace) and not attribute.startswith("_"):
                return getattr(obj, attribute, None) or super().getattr(obj, attribute)
            if type(obj) in (str, Attributed) and attribute in STRING_METHODS:
                return getattr(obj, attribute)
            return super().getattr(obj, attribute)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in Jinja)
            if __self.records and type(getattr(__obj, "__self__", None)) in (str, Attributed, datetime.datetime):
                _refuse_guarded([args, [value for name, value in kwargs.items() if name not in CALL_NAMES]])
            return super().call(__context, __obj, *args, **kwargs)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])

    def join_output(pieces: Iterable[str]) -> Attributed:
        pieces = list(pieces)
        environment.budget.allow(sum(map(str.__len__, pieces)))
        return concat(pieces)

    environment.concat = join_output  # type: ignore[method-assign]
    environment.filters |= {"join": _join, _CONCAT: join, _IN: _is_in}
    for name in ("iterable", "sequence"):
        environment.tests[name] = _of_values(environment.tests[name])
    environment.globals |= {"raise_exception": _raise, TAG: _mark_tag, _ENDED: _mark_end}
    if date is not None:
        midnight = datetime.datetime.fromisoformat(date)
        environment.globals["strftime_now"] = midnight.strftime
    return environment


def _output(name: str, *arguments: Any, line: int) -> Any:
    """Make the node `{{ name(arguments) }}`."""
    from jinja2 import nodes

    call = nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)
    return nodes.Output([call]).set_lineno(line)


def _calls_by_name(tree: Any) -> list[Any]:
    from jinja2 import nodes

    return [call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]


def _report_loops(node: Any, numbers: itertools.count[int]) -> None:
    """Make every loop report its passes and its end, and let the sizes of what namespaces keep be looked at."""
    from jinja2 import nodes

    for field in node.fields:
        value = getattr(node, field)
        if isinstance(value, nodes.Node):
            _report_loops(value, numbers)
        if not isinstance(value, list):
            continue
        reported: list[Any] = []
        for child in value:
            reported.append(child)
            if not isinstance(child, nodes.Node):
                continue
            _report_loops(child, numbers)
            if isinstance(child, nodes.Assign) and isinstance(child.target, nodes.NSRef):
                child.node = nodes.Filter(child.node, _KEPT, [], [], None, None)
            if isinstance(child, nodes.For):
                loop, line = nodes.Const(next(numbers)), child.lineno
                target = child.target if isinstance(child.target, nodes.Name) else child.target.find(nodes.Name)
                value = nodes.Name(getattr(target, "name", ""), "load")
                marked = nodes.Filter(value, _REACHED, [loop], [], None, None)
                if child.test is not None:
                    child.test = nodes.And(nodes.Filter(value, _TESTED, [], [], None, None), child.test)
                taken = [nodes.Filter(one, _TAKEN, [value, loop], [], None, None) for one in _lists_of_places(child)]
                child.body.insert(0, nodes.Output([marked, *taken]).set_lineno(line))
                reported.append(_output(_ENDED, loop, line=line))
        setattr(node, field, reported)


def _lists_of_places(loop: Any) -> list[Any]:
    """Return the lists from which a loop over numbers takes the item at each number: `messages` in `messages[i]`."""
    from jinja2 import nodes

    if not isinstance(loop.iter, nodes.Call) or getattr(loop.iter.node, "name", "") != "range":
        return []
    taken = (
        item.node.name
        for item in loop.find_all(nodes.Getitem)
        if isinstance(item.node, nodes.Name) and getattr(item.arg, "name", "") == getattr(loop.target, "name", None)
    )
    set_inside = {name.name for name in loop.find_all(nodes.Name) if name.ctx != "load"}
    return [nodes.Name(name, "load") for name in dict.fromkeys(taken) if name not in set_inside]


def _replace_operators(node: Any) -> None:
    """Replace each `a ~ b` by a filter that keeps sources, and each `a in b` by one that knows strings with marks."""
    from jinja2 import nodes

    def replaced(child: Any) -> Any:
        if not isinstance(child, nodes.Node):
            return child
        _replace_operators(child)
        if isinstance(child, nodes.Concat):
            values = nodes.List(child.nodes, lineno=child.lineno)
            return nodes.Filter(values, _CONCAT, [], [], None, None).set_lineno(child.lineno)
        if isinstance(child, nodes.Compare) and not isinstance(child.expr, nodes.Const) and len(child.ops) == 1:
            operator, operand = child.ops[0].op, child.ops[0].expr
            if operator in ("in", "notin"):
                found = nodes.Filter(child.expr, _IN, [operand], [], None, None).set_lineno(child.lineno)
                return found if operator == "in" else nodes.Not(found).set_lineno(child.lineno)
        return child

    for field in node.fields:
        value = getattr(node, field)
        setattr(node, field, [replaced(child) for child in value] if isinstance(value, list) else replaced(value))


def _find_prompt(tree: Any) -> tuple[bool, bool]:
    """Say whether what the template writes after its last loop is the same for all conversations, and is all it asks.

    The first holds if the nodes after the last loop refer to no name that depends on the conversation, the second if
    only these nodes refer to the request for a generation prompt.
    """
    from jinja2 import nodes

    last = max((at for at, node in enumerate(tree.body) if isinstance(node, nodes.For)), default=None)
    if last is None:
        return False, False
    open_names = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"} | {"messages", "tools"}
    open_names |= {macro.name for macro in tree.find_all(nodes.Macro)}
    before, after = tree.body[: last + 1], tree.body[last + 1 :]
    open_names -= _settled(before, open_names)
    return not _names_in(after) & open_names, PROMPT not in _names_in(before)


def _settled(body: list[Any], open_names: set[str]) -> set[str]:
    """Return the names that a template sets once, outside of loops and conditions, to what no conversation decides."""
    from jinja2 import nodes

    settled: set[str] = set()
    changed = {reference.name for node in body for reference in node.find_all(nodes.NSRef)}
    for node in body:
        if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and node.target.name not in changed:
            rest = [other for other in body if other is not node]
            is_set_again = any(
                name.name == node.target.name and name.ctx != "load" for other in rest for name in _names(other)
            )
            if not is_set_again and not (_names_in([node.node]) - {node.target.name}) & (open_names - settled):
                settled.add(node.target.name)
    return settled


def _names_in(some: list[Any]) -> set[str]:
    return {name.name for node in some for name in _names(node)}


def _names(node: Any) -> list[Any]:
    from jinja2 import nodes

    return [*node.find_all(nodes.Name), *([node] if isinstance(node, nodes.Name) else [])]


def _mark_tag(kind: str) -> str:
    return attach("", [Part(0, 0, Event(kind))])


def _mark_end(loop: int) -> str:
    return attach("", [Part(0, 0, Event("end", loop))])


def _join(value: Any, d: str = "", attribute: str | None = None) -> str:
    return join(value if attribute is None else [item[attribute] for item in value], d)


def _is_in(value: Any, container: Any) -> bool:
    if isinstance(container, str) and not isinstance(container, Guarded):
        _refuse_guarded(value)
    return value in container


def _of_values(test: Any) -> Callable[[Any], bool]:
    """Let a test know the types of records, so that it need not try what recorded values refuse."""
    return lambda value: isinstance(value, (str, dict, list)) or test(value)


def _refuse_guarded(value: Any) -> None:
    """Refuse to give a string with marks to what would look at its characters."""
    if isinstance(value, Guarded):
        raise Unrecordable
    for one in value.values() if type(value) is dict else value if type(value) in (list, tuple) else ():
        _refuse_guarded(one)


def _raise(message: str) -> Callable[..., Any]:
    _refuse_guarded(message)
    raise TemplateRefused(f"the chat template refuses it: {message}")
