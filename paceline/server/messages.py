"""Chat messages: what is accepted, and how they become the text of a prompt.

Decisions: text parts go to the template, which takes them or gets them joined by newlines. `developer` is read as
`system`, which every template knows. A last message of the assistant is continued (no new turn is opened after it),
unless add_generation_prompt says otherwise; two of them in a row are refused. Images, audio, tool calls: refused.
Reasoning that a client sends back goes to the template, which knows what to keep of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import RequestError, Unsupported
from .fields import unknown_fields
from .replies import shown

if TYPE_CHECKING:
    from ..model.chat_template import ChatTemplate

ROLES = ("system", "developer", "user", "assistant")
TOOL_ROLES = ("tool", "function")
MAX_MESSAGES = 10_000
MESSAGE_KEYS = ("role", "content", "name", "reasoning_content")
NEUTRAL_KEYS: dict[str, tuple[Any, ...]] = {    # what clients send back from an earlier answer, asking for nothing
    "refusal": ("",),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
}
RESERVED_VARIABLES = {    # of chat_template_kwargs: what the request says elsewhere
    "messages": "send them as the request's field", "tools": "tools are not supported",
    "add_generation_prompt": "send it as the request's field",
    "continue_final_message": "send it as the request's field"}


def read_messages(value: Any) -> list[dict[str, Any]]:
    """The messages as templates want them: role, content as text or text parts, name if given."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"messages: must be a non-empty list of messages, got {shown(value)}", "messages")
    if len(value) > MAX_MESSAGES:
        raise RequestError(f"messages: at most {MAX_MESSAGES}, got {len(value)}", "messages")
    messages = [_read_message(f"messages[{index}]", one) for index, one in enumerate(value)]
    if len(messages) > 1 and messages[-1]["role"] == messages[-2]["role"] == "assistant":
        raise RequestError("messages: two messages of the assistant at the end; one can be continued", "messages")
    return messages


def unknown_message_keys(value: list[dict[str, Any]], is_strict: bool) -> tuple[str, ...]:
    """Keys of messages that mean nothing here, each once. A strict server refuses them."""
    known = (*MESSAGE_KEYS, *NEUTRAL_KEYS)
    keys = dict.fromkeys(key for message in value for key in message)
    return tuple(f"messages.{key}" for key in unknown_fields(keys, known, is_strict))


def _read_message(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name}: must be an object with role and content, got {shown(value)}", "messages")
    for key, accepted in NEUTRAL_KEYS.items():
        if value.get(key) is not None and value[key] not in accepted:
            raise Unsupported(f"{name}.{key}: not supported", "messages")
    message: dict[str, Any] = {"role": _read_role(f"{name}.role", value.get("role"))}
    message["content"] = _read_content(f"{name}.content", value.get("content"))
    if value.get("name") is not None:
        if not isinstance(value["name"], str):
            raise RequestError(f"{name}.name: must be a string, got {shown(value['name'])}", "messages")
        message["name"] = value["name"]
    reasoning = value.get("reasoning_content")
    if reasoning not in (None, ""):
        if not isinstance(reasoning, str) or message["role"] != "assistant":
            wanted = f"must be a string, of the assistant, got {shown(reasoning)}"
            raise RequestError(f"{name}.reasoning_content: {wanted}", "messages")
        message["reasoning_content"] = reasoning
    return message


def _read_role(name: str, role: Any) -> str:
    if role in TOOL_ROLES:
        raise Unsupported(f"{name}: {role} messages are not supported", "messages")
    if role not in ROLES:
        raise RequestError(f"{name}: must be one of {', '.join(ROLES)}, got {shown(role)}", "messages")
    return "system" if role == "developer" else str(role)


def _read_content(name: str, content: Any) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        wanted = "a string or a non-empty list of text parts"
        raise RequestError(f"{name}: must be {wanted}, got {shown(content)}", "messages")
    return [_read_part(f"{name}[{index}]", part) for index, part in enumerate(content)]


def _read_part(name: str, part: Any) -> dict[str, str]:
    if not isinstance(part, dict):
        raise RequestError(f"{name}: must be a part with type and text, got {shown(part)}", "messages")
    if part.get("type") != "text":
        raise Unsupported(f"{name}.type: only text is supported, got {shown(part.get('type'))}", "messages")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{name}.text: must be a string, got {shown(part.get('text'))}", "messages")
    return {"type": "text", "text": part["text"]}


def num_chars_of(messages: list[dict[str, Any]]) -> int:
    contents = [one["content"] for one in messages]
    texts = [one for one in contents if isinstance(one, str)]
    texts += [one["reasoning_content"] for one in messages if "reasoning_content" in one]
    texts += [part["text"] for one in contents if not isinstance(one, str) for part in one]
    return sum(map(len, texts))


def turn_flags(
    messages: list[dict[str, Any]], add_generation_prompt: bool | None, continue_final_message: bool | None
) -> tuple[bool, bool]:
    """(open a new turn, continue the last message), from what the client said or left out."""
    is_assistant_last = messages[-1]["role"] == "assistant"
    if add_generation_prompt and continue_final_message:
        message = "continue_final_message: cannot be true together with add_generation_prompt"
        raise RequestError(message, "continue_final_message")
    if continue_final_message and not is_assistant_last:
        message = "continue_final_message: the last message must be the assistant's"
        raise RequestError(message, "continue_final_message")
    if continue_final_message is None:
        continue_final_message = is_assistant_last and add_generation_prompt is None
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return add_generation_prompt, continue_final_message


def read_variables(value: dict[str, Any] | None) -> dict[str, Any]:
    """chat_template_kwargs. Their values are the template's affair, their names must not be those of others."""
    for name in value or {}:
        if name in RESERVED_VARIABLES:
            where = f"chat_template_kwargs.{shown(name)}"
            raise RequestError(f"{where}: not a variable of the template; {RESERVED_VARIABLES[name]}",
                               "chat_template_kwargs")
    return value or {}


def unread_variables(variables: Mapping[str, Any], template: ChatTemplate, is_strict: bool) -> tuple[str, ...]:
    """Variables that mean nothing to the template, as fields would be called. A strict server refuses them."""
    unread = tuple(f"chat_template_kwargs.{name}" for name in variables if not template.reads(name))
    if unread and is_strict:
        message = f"{shown(unread[0])}: the chat template reads no such variable, and this server refuses those"
        raise RequestError(message, "chat_template_kwargs")
    return unread
