"""Chat messages to prompt text with the model's own Jinja template, set up as transformers does.

A template comes with the model, so it is data we do not trust to be right: it runs in Jinja's immutable sandbox (no
attributes that reach Python's internals, no changes to what it is given), and it cannot hang or exhaust the server.
Bounded in one render: loop iterations (MAX_ITERATIONS, counted over all loops), range() (100,000, the sandbox's own),
recursion (Python's), results of + * ** ~ and the whole output (MAX_TEXT characters). Not bounded: a template that
grows text by filters such as replace.

Whatever goes wrong while rendering is a RequestError on `messages`: raise_exception is how templates refuse them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from ..errors import ModelError, RequestError, Unsupported

MAX_ITERATIONS = 1_000_000
MAX_TEXT = 16 << 20
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template, or several by name ("default", and "tool_use" for requests with tools).

    special_tokens (bos_token, eos_token, ...) are variables of the template. `now` is what strftime_now reads.
    ModelError when a template does not compile.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None,
                 now: Callable[[], datetime] = datetime.now) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            raise ModelError(f"chat template: none is named 'default' among {sorted(sources)}")
        environment = _Environment(now)
        self.sources = sources
        self._special_tokens = dict(special_tokens or {})
        self._templates = {name: _compile(environment, text) for name, text in sources.items()}
        self._takes_parts = {name: _takes_parts(environment, text) for name, text in sources.items()}

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Any] | None = None,
               **variables: Any) -> str:
        """The prompt; encode it without special tokens, it has its own BOS.

        messages are mappings with a role; content is text, null, or a list of text parts, which are joined with
        newlines unless the template walks over parts itself. Keys with null values are left out, as transformers
        does. RequestError(param="messages") for malformed messages and whatever the template refuses.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        chat = [_plain_message(index, message, self._takes_parts[name]) for index, message in enumerate(messages)]
        if not chat:
            raise RequestError("messages: at least one message is needed", param="messages")
        context = {**self._special_tokens, "tools": tools, "documents": None, **variables, "messages": chat,
                   "add_generation_prompt": add_generation_prompt}
        try:
            return _render(self._templates[name], context)
        except jinja2.UndefinedError as error:
            if all("content" in message for message in chat):
                raise RequestError(f"messages: the chat template failed: {error}", param="messages") from error
        for message in chat:        # a template that wants a content everywhere: null is the empty text
            message.setdefault("content", "")
        try:
            return _render(self._templates[name], context)
        except jinja2.UndefinedError as error:
            raise RequestError(f"messages: the chat template failed: {error}", param="messages") from error


def require_chat_template(template: ChatTemplate | None) -> ChatTemplate:
    """The template, or the RequestError for a model that has none."""
    if template is None:
        raise RequestError("messages: this model has no chat template; send a prompt to /v1/completions instead",
                           param="messages", code="no_chat_template")
    return template


# ---- messages

def _plain_message(index: int, message: Any, takes_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}]: must be an object with a role", param="messages")
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        texts = [_part_text(f"messages[{index}].content[{place}]", part) for place, part in enumerate(content)]
        plain["content"] = [{"type": "text", "text": text} for text in texts] if takes_parts else "\n".join(texts)
    elif content is not None and not isinstance(content, str):
        raise RequestError(f"messages[{index}].content: must be text, null or a list of parts", param="messages")
    return plain


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise RequestError(f"{where}: must be an object with a type", param="messages")
    if part["type"] not in _TEXT_PARTS:
        raise Unsupported(f"{where}: type {part['type']!r:.60} is not supported, only text", param="messages")
    text = part.get("refusal" if part["type"] == "refusal" else "text")
    if not isinstance(text, str):
        raise RequestError(f"{where}: its text is missing", param="messages")
    return text


# ---- rendering

class _Budget(threading.local):
    """Loop iterations left to the render that runs on this thread."""

    iterations_left = 0


_budget = _Budget()


def _render(template: jinja2.Template, context: Mapping[str, Any]) -> str:
    _budget.iterations_left = MAX_ITERATIONS
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.generate(**context):
            num_chars += len(piece)
            _refuse_growth(num_chars)
            pieces.append(piece)
    except jinja2.UndefinedError:
        raise       # the caller may know a remedy
    except jinja2.TemplateError as error:
        raise RequestError(f"messages: {error.message or type(error).__name__}", param="messages") from error
    except Exception as error:      # an expression of the template met data it was not written for
        raise RequestError(f"messages: the chat template failed: {type(error).__name__}: {error}",
                           param="messages") from error
    return "".join(pieces)


def _refuse_growth(size: int) -> None:
    if size > MAX_TEXT:
        raise SecurityError(f"the chat template made more than {MAX_TEXT} characters")


def _counted(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        _budget.iterations_left -= 1
        if _budget.iterations_left < 0:
            raise SecurityError(f"the chat template ran more than {MAX_ITERATIONS} loop iterations")
        yield item


def _joined(parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    _refuse_growth(sum(map(len, texts)))
    return "".join(texts)


# ---- the environment

class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks what the assistant said, for training; here its body is all that matters."""

    tags = {"generation"}       # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(lineno)


class _Bounded(jinja2.visitor.NodeTransformer):
    """Sends what every loop walks over through _counted, and every ~ through _joined."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        node.iter = jinja2.nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return self.generic_visit(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return self.generic_visit(
            jinja2.nodes.Filter(parts, "_joined", [], [], None, None, lineno=node.lineno))


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**"])

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        self.filters.update(tojson=_tojson, _counted=_counted, _joined=_joined)
        self.globals.update(raise_exception=_raise_exception, dict=_TemplateDict(), namespace=_TemplateNamespace,
                            strftime_now=lambda form: now().strftime(form))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template: jinja2.nodes.Template = _Bounded().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuses results that would not fit before they are made."""
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _refuse_growth(len(left) + len(right))
        elif operator == "*":
            for text, times in ((left, right), (right, left)):
                if hasattr(text, "__len__") and isinstance(times, int):
                    _refuse_growth(len(text) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _refuse_growth(left.bit_length() * max(right, 0))
        return super().call_binop(context, operator, left, right)


class _TemplateDict:
    """dict for templates, without the class's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


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


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compile(environment: jinja2.Environment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"chat template, line {error.lineno}: {error.message}") from error
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        raise ModelError(f"chat template: does not compile: {type(error).__name__}: {error}") from error


def _takes_parts(environment: jinja2.Environment, source: str) -> bool:
    """The template loops over some message's content, so it is given the list of parts as it is."""
    tree = environment.parse(source)
    aliases = {assign.target.name for assign in tree.find_all(jinja2.nodes.Assign)
               if isinstance(assign.target, jinja2.nodes.Name) and _is_content(assign.node, set())}
    return any(_is_content(loop.iter, aliases) for loop in tree.find_all(jinja2.nodes.For))


def _is_content(node: Any, aliases: set[str]) -> bool:
    while isinstance(node, jinja2.nodes.Filter):
        node = node.node
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    if isinstance(node, jinja2.nodes.Getattr):
        return bool(node.attr == "content")
    return isinstance(node, jinja2.nodes.Name) and node.name in aliases
