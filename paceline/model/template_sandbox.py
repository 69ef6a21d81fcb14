"""The Jinja environment chat templates run in: set up as transformers sets up its own, and bounded.

A template comes with the model or in a request, so it is data we do not trust to be right. Jinja's immutable sandbox
keeps it away from Python's internals and from changing what it is given, but bounds nothing beyond the length of one
range(). Bounded here, in one render:

    MAX_TURNS    turns of loops, calls and filters, all together
    MAX_TEXT     characters (or items) of one result, and of the whole prompt; what can make much out of little is
                 sized before it runs
    MAX_COPIED   characters made by all operations together
    MAX_INT_BITS size of an integer made by * and **
    MAX_SECONDS  time; looked at on every turn, and one turn is bounded by the sizes above

Recursion is bounded by Python. Whatever passes a bound ends in jinja2.sandbox.SecurityError.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.utils
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_TURNS = 1_000_000
MAX_TEXT = 16 << 20
MAX_COPIED = 4 << 30
MAX_INT_BITS = 1 << 16
MAX_SECONDS = 10.0
_MAX_PRECISION = 300        # decimal digits of a float


# ---- what a render may take

class _Budget(threading.local):
    """What is left to the render on this thread. Outside of one nothing is: jinja2 cannot fold bounded operations into
    constants while it compiles."""

    turns_left = 0
    chars_left = 0
    deadline = 0.0
    monotonic: Callable[[], float] = staticmethod(time.monotonic)


_budget = _Budget()


def start_render(monotonic: Callable[[], float]) -> None:
    """Everything that follows on this thread is one render, until the next call."""
    _budget.turns_left, _budget.chars_left = MAX_TURNS, MAX_COPIED
    _budget.monotonic = monotonic
    _budget.deadline = monotonic() + MAX_SECONDS


def take_turn() -> None:
    _budget.turns_left -= 1
    if _budget.turns_left < 0:
        raise SecurityError(f"the chat template took more than {MAX_TURNS} turns of its loops, calls and filters")
    if _budget.monotonic() > _budget.deadline:
        raise SecurityError(f"the chat template ran for more than {MAX_SECONDS:g} seconds")


def refuse_size(size: int) -> None:
    if size > MAX_TEXT:
        raise SecurityError(f"the chat template made more than {MAX_TEXT} characters")


def take_chars(size: int) -> None:
    """To be told before a result of that size is made, where that can be known."""
    refuse_size(size)
    _budget.chars_left -= size
    if _budget.chars_left < 0:
        raise SecurityError(f"the chat template copied more than {MAX_COPIED} characters")


def _counted(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        take_turn()
        yield item


def _concatenated(parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    take_chars(sum(map(len, texts)))
    return "".join(texts)


# ---- how large a result may become: by the name of a filter or of a method of strings

def _padded(text: Any, width: int = 80, *_: Any) -> int:
    return max(len(str(text)), width)


def _tabs(text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * max(tabsize, 0)


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return len(text) + text.count(old) * max(len(new) - len(old), 0)


def _indented(text: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    text = str(text)
    return len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else width)


def _wrapped(text: Any, *_: Any, wrapstring: str | None = None, **__: Any) -> int:
    return len(str(text)) * (2 if wrapstring is None else 1 + len(wrapstring))


def _linked(text: Any, *args: Any, **more: Any) -> int:
    extra = sum(len(value) for value in (*args, *more.values()) if isinstance(value, str))
    return 5 * len(str(text)) + str(text).count(".") * (64 + extra)


def _translated(text: str, table: Mapping[Any, Any]) -> int:
    return len(text) * max((len(value) for value in table.values() if isinstance(value, str)), default=1)


def _joined(separator: str, items: Sequence[Any]) -> int:
    return sum(len(str(item)) for item in items) + len(separator) * len(items)


def _percent_formatted(text: Any, *values: Any, **named: Any) -> int:
    fields = re.findall(r"%(?:\([^)]*\))?([-+ #0-9.*]*)", str(text))
    if any("*" in field for field in fields):
        raise SecurityError("the chat template takes the width of a field from a value")
    return len(str(text)) + _fields_size(fields, (*values, *named.values()))


def _brace_formatted(text: str, *values: Any, **named: Any) -> int:
    bare = text.replace("{{", "").replace("}}", "")
    if re.search(r"\{[^{}]*\{", bare):
        raise SecurityError("the chat template takes the width of a field from a value")
    return len(text) + _fields_size(re.findall(r"\{[^{}]*\}", bare), (*values, *named.values()))


def _fields_size(fields: Sequence[str], values: Sequence[Any]) -> int:
    """Every field may become the longest value; its numbers are widths, precisions or places."""
    numbers = (digits.lstrip("0")[:9] for field in fields for digits in re.findall(r"\d+", field))
    longest = max((len(str(value)) for value in values), default=0)
    return len(fields) * longest + sum(int(digits) for digits in numbers if digits)


def _rounded(value: Any, precision: int = 0, *_: Any) -> int:
    if precision > _MAX_PRECISION:
        raise SecurityError(f"the chat template rounds to more than {_MAX_PRECISION} digits")
    return 0


Size = Callable[..., int]
METHODS: dict[str, Size] = {
    "center": _padded, "ljust": _padded, "rjust": _padded, "zfill": _padded, "expandtabs": _tabs, "replace": _replaced,
    "translate": _translated, "join": _joined, "format": _brace_formatted,
    "format_map": lambda text, values: _brace_formatted(text, *values.values())}
FILTERS: dict[str, Size] = {
    "center": _padded, "replace": _replaced, "indent": _indented, "wordwrap": _wrapped, "urlize": _linked,
    "format": _percent_formatted, "round": _rounded, "batch": lambda items, size, *_: size,
    "slice": lambda items, slices, *_: slices}


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    size = FILTERS.get(name)
    first = int(hasattr(function, "jinja_pass_arg"))        # an environment or context comes before the value

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        take_turn()
        if size is not None:
            take_chars(size(*args[first:], **kwargs))
        result = function(*args, **kwargs)
        if isinstance(result, str):
            take_chars(len(result))
        return result

    return bounded


@jinja2.pass_eval_context
def _join(eval_context: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    take_chars(_joined(str(d), items))
    return jinja2.filters.sync_do_join(eval_context, items, d, attribute)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """transformers' own: no escapes for HTML. In pieces, for an indentation can be any size."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    take_chars(len(indent) if isinstance(indent, str) else indent)
    pieces = []
    for piece in encoder.iterencode(value):
        take_chars(len(piece))
        pieces.append(piece)
    return "".join(pieces)


# ---- the environment

class Environment(ImmutableSandboxedEnvironment):
    """now is what strftime_now reads."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        self.filters.update(tojson=_tojson, join=_join)
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters.update(_counted=_counted, _concatenated=_concatenated)
        self.globals.update(raise_exception=_raise_exception, dict=_TemplateDict(), namespace=_TemplateNamespace,
                            strftime_now=lambda form: now().strftime(form))
        del self.globals["lipsum"]      # random text: the same request would not give the same prompt

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template: jinja2.nodes.Template = _Bounded().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuses results that would not fit before they are made."""
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            take_chars(len(left) + len(right))
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if hasattr(text, "__len__") and isinstance(times, int):
                    take_chars(len(text) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            values = right.values() if isinstance(right, Mapping) else right if isinstance(right, tuple) else (right,)
            take_chars(_percent_formatted(left, *values))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * max(right, 0)
            if bits > MAX_INT_BITS:
                raise SecurityError(f"the chat template made an integer of more than {MAX_INT_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call of a function, macro or method in a template comes here."""
        take_turn()
        method = getattr(__obj, "__wrapped__", __obj)       # the sandbox wraps str.format
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str) and name in METHODS:
            if name == "join":
                args = tuple(list(items) for items in args)
            take_chars(METHODS[name](text, *args, **kwargs))
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            take_chars(len(result))
        return result


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks what the assistant said, for training; here its body is all that matters."""

    tags = {"generation"}       # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(lineno)


class _Bounded(jinja2.visitor.NodeTransformer):
    """Sends what every loop walks over through _counted, and every ~ through _concatenated."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        node.iter = jinja2.nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return self.generic_visit(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return self.generic_visit(
            jinja2.nodes.Filter(parts, "_concatenated", [], [], None, None, lineno=node.lineno))


class _TemplateDict:
    """dict for templates, without the class's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """namespace() that stores no underscore names, which would reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:      # no named self: namespace(self=...) is legal
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the chat template stores the private name {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
