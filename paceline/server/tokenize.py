"""Text to token ids and back over HTTP, in the shapes of vLLM and of llama.cpp, told apart by their keys.

    POST /tokenize    {"prompt": text} or {"messages": [...]}    vLLM's; messages give the ids that a chat would run on
                      {"content": text}                          llama.cpp's; with_pieces: [{"id", "piece"}]
    POST /detokenize  {"tokens": [ids]}                          answers `prompt` (vLLM's name) and `content`
    GET  /tokenizer_info                                         special tokens and the chat template

A prompt may be longer than the context here: whoever cuts a text must count it first. Messages may not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..config import ServerConfig
from ..errors import RequestError
from ..model.tokenizer import Tokenizer
from .engine_port import Engine
from .fields import Field, check_token_ids, read_fields, unknown_fields
from .limits import read_object
from .openai import CallReader
from .prompts import off_loop
from .replies import HttpError, json_response, shown
from .reply import ignored_header

MAX_CHARS = 1 << 20
MODEL = Field("string", None, 1, 1024)
PROMPT: dict[str, Field] = {
    "model": MODEL, "prompt": Field("string", "", 0, MAX_CHARS), "add_special_tokens": Field("boolean", True),
    "return_token_strs": Field("boolean", False)}
CONTENT: dict[str, Field] = {
    "model": MODEL, "content": Field("string", "", 0, MAX_CHARS), "add_special": Field("boolean", False),
    "with_pieces": Field("boolean", False)}
TOKENS: dict[str, Field] = {"model": MODEL}
SHAPES = ("prompt", "messages", "content")


class TokenizeRoutes:
    """The routes that need the tokenizer only."""

    def __init__(self, engine: Engine, config: ServerConfig, reader: CallReader) -> None:
        self.engine = engine
        self.config = config
        self.reader = reader

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.info, methods=["GET"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request)
        shapes = [name for name in SHAPES if body.get(name) is not None]
        if len(shapes) != 1:
            got = " and ".join(shapes) or "none of them"
            raise RequestError(f"prompt: send one of {', '.join(SHAPES)}, got {got}", "prompt")
        if shapes == ["messages"]:
            return await self._tokenize_messages(body)
        table = PROMPT if shapes == ["prompt"] else CONTENT
        values = read_fields(body, table)
        self.reader.served_name(values["model"])
        ignored = unknown_fields(body, table, self.config.strict_fields)
        text = values[shapes[0]]
        adds_special = values["add_special_tokens" if shapes == ["prompt"] else "add_special"]
        token_ids = await off_loop(len(text), lambda: self._tokenizer.encode(text, adds_special))
        if values.get("with_pieces"):
            answer = self._answer(token_ids) | {"tokens": pieces(self._tokenizer, token_ids)}
        else:
            answer = self._answer(token_ids, bool(values.get("return_token_strs")))
        return json_response(answer, headers=ignored_header(ignored))

    async def _tokenize_messages(self, body: Mapping[str, Any]) -> Response:
        """Asks the reader of chats itself, so that the ids are those that the chat would run on."""
        wants_texts = Field("boolean", False).read("return_token_strs", body.get("return_token_strs"))
        call = await self.reader.chat({name: value for name, value in body.items() if name != "return_token_strs"})
        answer = self._answer(call.prompts[0].token_ids, wants_texts)
        return json_response(answer, headers=ignored_header(call.ignored))

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request)
        self.reader.served_name(read_fields(body, TOKENS)["model"])
        ignored = unknown_fields(body, ("model", "tokens"), self.config.strict_fields)
        token_ids = body.get("tokens")
        if not isinstance(token_ids, list):
            raise RequestError(f"tokens: must be a list of token ids, got {shown(token_ids)}", "tokens")
        check_token_ids("tokens", token_ids, self.engine.model.vocab_size)
        text = await off_loop(len(token_ids), lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))
        return json_response({"prompt": text, "content": text}, headers=ignored_header(ignored))

    async def info(self, request: Request) -> Response:
        self._check_loaded()
        template = self.engine.model.chat_template
        sources = None if template is None else template.sources    # by name, where a model has several
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        return json_response({
            **{name: self._tokenizer.special_tokens.get(name) for name in names},
            "chat_template": sources["default"] if sources is not None and len(sources) == 1 else sources,
            "model_max_length": self.engine.model.max_model_len, "vocab_size": self._tokenizer.vocab_size,
        })

    async def _read(self, request: Request) -> dict[str, Any]:
        self._check_loaded()
        return await read_object(request, self.config.max_body_bytes, self.config.max_json_depth)

    def _check_loaded(self) -> None:
        if self.engine.state == "loading":
            raise HttpError(503, "the engine is loading", "engine_loading", headers={"Retry-After": "1"})

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.engine.model.tokenizer

    def _answer(self, token_ids: Sequence[int], wants_texts: bool = False) -> dict[str, Any]:
        texts = [self._tokenizer.inner.id_to_token(token_id) for token_id in token_ids] if wants_texts else None
        return {"count": len(token_ids), "max_model_len": self.engine.model.max_model_len, "tokens": list(token_ids),
                "token_strs": texts}


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Each token with its text, or with its bytes where those are no text by themselves."""
    found: list[dict[str, Any]] = []
    for token_id in token_ids:
        raw = tokenizer.token_bytes(token_id)
        try:
            found.append({"id": token_id, "piece": raw.decode("utf-8")})
        except UnicodeDecodeError:
            found.append({"id": token_id, "piece": list(raw)})
    return found
