"""Chat messages to prompt text with a Jinja template, as transformers' apply_chat_template does it.

The environment, and what one render may take, are template_sandbox's. Whatever goes wrong while rendering is a
RequestError on `messages`: raise_exception is how templates refuse them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes

from ..errors import ModelError, RequestError, Unsupported
from .template_sandbox import Environment, refuse_size, start_render

MAX_TEMPLATE_CHARS = 1 << 20
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")     # names of one thing, the first the common one
# Behind a message that is continued. The space tells whether the template trims its contents.
_END_OF_FINAL = "PACELINE_END_OF_FINAL_MESSAGE "
_HIDDEN_FINAL = "continue_final_message: this model's chat template does not show the last message"

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template, or several by name ("default", and "tool_use" for requests with tools).

    special_tokens (bos_token, eos_token, ...) are variables of the template. `now` is what strftime_now reads,
    `monotonic` what the time limit counts. where: how messages call the template's source.
    ModelError when a template does not compile.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None,
                 now: Callable[[], datetime] = datetime.now, monotonic: Callable[[], float] = time.monotonic,
                 where: str = "chat template") -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            raise ModelError(f"{where}: none is named 'default' among {sorted(sources)}")
        environment = Environment(now)
        self.sources = sources
        self._special_tokens = dict(special_tokens or {})
        self._monotonic = monotonic
        self._templates = {name: _compile(environment, text, where) for name, text in sources.items()}
        trees = {name: environment.parse(text) for name, text in sources.items()}
        self._takes_parts = {name: _takes_parts(tree) for name, tree in trees.items()}
        self._variables = frozenset[str]().union(*map(jinja2.meta.find_undeclared_variables, trees.values()))

    def reads(self, variable: str) -> bool:
        """Whether the template looks at a variable of this name at all."""
        return variable in self._variables

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Any] | None = None,
               variables: Mapping[str, Any] | None = None, continue_final_message: bool = False) -> str:
        """The prompt; encode it without special tokens, it has its own BOS.

        messages are mappings with a role; content is text, null, or a list of text parts, which are joined with
        newlines unless the template walks over parts itself. Keys with null values are left out, and reasoning is
        given under all its names, as transformers does. variables are further ones for the template, and win over the
        special tokens. continue_final_message ends the prompt with the last message's content, its turn still open.
        RequestError(param="messages") for malformed messages and whatever the template refuses.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        chat = [_plain_message(index, message, self._takes_parts[name]) for index, message in enumerate(messages)]
        if not chat:
            raise RequestError("messages: at least one message is needed", param="messages")
        final = _mark_final(chat[-1], self.sources[name]) if continue_final_message else None
        context = {"documents": None, **self._special_tokens, **(variables or {}), "tools": tools, "messages": chat,
                   "add_generation_prompt": add_generation_prompt}
        text = self._render_or_fill(self._templates[name], context, chat)
        return text if final is None else _cut_behind(text, final)

    def _render_or_fill(self, template: jinja2.Template, context: Mapping[str, Any], chat: list[dict[str, Any]]) -> str:
        try:
            return self._render(template, context)
        except jinja2.UndefinedError as error:
            if all("content" in message for message in chat):
                raise RequestError(f"messages: the chat template failed: {error}", param="messages") from error
        for message in chat:        # a template that wants a content everywhere: null is the empty text
            message.setdefault("content", "")
        try:
            return self._render(template, context)
        except jinja2.UndefinedError as error:
            raise RequestError(f"messages: the chat template failed: {error}", param="messages") from error

    def _render(self, template: jinja2.Template, context: Mapping[str, Any]) -> str:
        start_render(self._monotonic)
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in template.generate(context):
                num_chars += len(piece)
                refuse_size(num_chars)
                pieces.append(piece)
        except jinja2.UndefinedError:
            raise       # the caller may know a remedy
        except jinja2.TemplateError as error:
            raise RequestError(f"messages: {error.message or type(error).__name__}", param="messages") from error
        except Exception as error:      # an expression of the template met data it was not written for
            raise RequestError(f"messages: the chat template failed: {type(error).__name__}: {error}",
                               param="messages") from error
        return "".join(pieces)


def template_from_file(path: Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
    """ModelError, with the path and for a mistake of syntax the line, unless it holds a template in UTF-8."""
    return ChatTemplate(read_template(path), special_tokens, where=str(path))


def read_template(path: Path) -> str:
    """The text. ModelError when there is none, or too much of it."""
    try:
        with path.open("rb") as file:
            raw = file.read(4 * MAX_TEMPLATE_CHARS + 1)
        text = raw.decode()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:     # also what a path with a NUL gives
        raise ModelError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ModelError(f"{path}: a chat template has at most {MAX_TEMPLATE_CHARS} characters")
    return text


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
    reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


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


# ---- a last message that is continued

def _mark_final(message: dict[str, Any], source: str) -> str:
    """Puts the mark behind the message's text, which is returned without it."""
    content = message.get("content")
    if "content" not in source:     # such a template dumps whole messages: their text has no end of its own
        raise RequestError(_HIDDEN_FINAL, param="continue_final_message")
    if isinstance(content, list) and content:
        content[-1] = {**content[-1], "text": content[-1]["text"] + _END_OF_FINAL}
        return str(content[-1]["text"].removesuffix(_END_OF_FINAL))
    if not isinstance(content, str):
        raise RequestError("continue_final_message: the last message has no content to continue",
                           param="continue_final_message")
    message["content"] = content + _END_OF_FINAL
    return content


def _cut_behind(text: str, final: str) -> str:
    head, mark, tail = text.rpartition(_END_OF_FINAL.rstrip())
    if not mark or final.strip() not in text:
        raise RequestError(_HIDDEN_FINAL, param="continue_final_message")
    return head if tail.startswith(" ") else head.rstrip()      # without the mark's space: contents are trimmed


# ---- compiling

def _compile(environment: jinja2.Environment, source: str, where: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"{where}, line {error.lineno}: {error.message}") from error
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        raise ModelError(f"{where}: does not compile: {type(error).__name__}: {error}") from error


def _takes_parts(tree: jinja2.nodes.Template) -> bool:
    """The template loops over some message's content, so it is given the list of parts as it is."""
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
