"""Chat messages: what is accepted, and how they become the text of a prompt.

Decisions: text parts go to the template, which takes them or gets them joined by newlines. `developer` is read as
`system`, which every template knows. A last message of the assistant is continued (no new turn is opened after it),
unless add_generation_prompt says otherwise; two of them in a row are refused. Images, audio, tool calls: refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import RequestError, Unsupported
from .fields import string, unknown_fields
from .replies import shown

if TYPE_CHECKING:
    from ..model.chat_template import ChatTemplate

ROLES = ("system", "developer", "user", "assistant")
TOOL_ROLES = ("tool", "function")
MAX_MESSAGES = 10_000
MESSAGE_KEYS = ("role", "content", "name")
NEUTRAL_KEYS: dict[str, tuple[Any, ...]] = {    # what clients send back from an earlier answer, asking for nothing
    "refusal": ("",),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "reasoning_content": ("",),
}
END_OF_FINAL = "\ue000paceline:end-of-final-message\ue000"    # private-use characters: no template emits them


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
        message["name"] = string(f"{name}.name", value["name"])
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


def render(template: ChatTemplate, messages: list[dict[str, Any]], flags: tuple[bool, bool]) -> str:
    """The prompt's text. A continued message is rendered with a mark behind it, and the text is cut at the mark."""
    add_generation_prompt, continue_final_message = flags
    if not continue_final_message:
        return template.render(messages, add_generation_prompt)
    text = template.render([*messages[:-1], _marked(messages[-1])], False)
    head, mark, _ = text.rpartition(END_OF_FINAL)
    if not mark:
        message = "continue_final_message: this model's chat template does not show the last message"
        raise RequestError(message, "continue_final_message")
    return head


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": content + END_OF_FINAL}
    last = {"type": "text", "text": content[-1]["text"] + END_OF_FINAL}
    return message | {"content": [*content[:-1], last]}
