"""OpenVINO GenAI's continuous batching behind an OpenAI-compatible route, so that it can be measured like a server.

Runs in OpenVINO's own environment (scripts/peers.sh): its pipeline and aiohttp, nothing of Paceline. One thread steps
the pipeline whenever requests are under way; a token is sent when its step has ended. POST /v1/completions takes text
or token ids, max_tokens, temperature, ignore_eos, min_tokens, stream and stream_options; GET /v1/models, /health. What
this server itself costs is seen beside scripts/in_process.py, the same pipeline without it.

  python scripts/openvino_server.py MODEL.gguf --port 8000 --max-num-seqs 32 --cache-size 2
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import itertools
import json
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
import openvino_genai
from aiohttp import web


class Pieces:
    """The bytes of each token, read once: a stream's new text then costs no call of the pipeline's tokenizer, which
    runs beside the steps on the same cores."""

    def __init__(self, tokenizer: Any) -> None:
        pieces = {token_id: piece for piece, token_id in tokenizer.get_vocab().items()}
        texts = tokenizer.decode([[token_id] for token_id in pieces])
        self._pieces = {token_id: b"" if text == "" and _is_text(piece) else piece    # "" of text: a special token
                        for (token_id, piece), text in zip(pieces.items(), texts, strict=True)}
        probe = "Two words, 3 \u00e9t\u00e9s."
        token_ids = tokenizer.encode(probe).input_ids.data[0].tolist()
        if (told := b"".join(map(self._pieces.__getitem__, token_ids)).decode(errors="replace")) != probe:
            raise SystemExit(f"this tokenizer's vocabulary is not of plain bytes: {probe!r} came back as {told!r}")

    def of(self, token_ids: list[int]) -> bytes:
        return b"".join(map(self._pieces.__getitem__, token_ids))


def _is_text(piece: bytes) -> bool:
    try:
        return bool(piece.decode())
    except UnicodeDecodeError:
        return False


@dataclass
class Job:
    """One request; news: lists of token ids, then the finish reason."""

    prompt: str | list[int]
    config: Any
    loop: asyncio.AbstractEventLoop
    news: asyncio.Queue[list[int] | str] = field(default_factory=asyncio.Queue)
    is_dropped: bool = False
    num_prompt_tokens: int = 0

    def tell(self, news: list[int] | str) -> None:
        self.loop.call_soon_threadsafe(self.news.put_nowait, news)


class Stepper(threading.Thread):
    """Owns the pipeline: nobody else calls it."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(name="openvino", daemon=True)
        self.pipeline = pipeline
        self.tokenizer = pipeline.get_tokenizer()
        self.waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._numbers = itertools.count()

    def run(self) -> None:
        running: list[tuple[Job, Any]] = []
        while True:
            if not running:
                running.append(self._start(self.waiting.get()))
            while not self.waiting.empty():
                running.append(self._start(self.waiting.get_nowait()))
            self.pipeline.step()
            running = [one for one in running if self._publish(*one)]

    def _start(self, job: Job) -> tuple[Job, Any]:
        if isinstance(job.prompt, str):
            tokens = self.tokenizer.encode(job.prompt).input_ids
        else:
            tokens = openvino.Tensor(np.asarray([job.prompt], np.int64))
        job.num_prompt_tokens = int(tokens.get_shape()[1])
        return job, self.pipeline.add_request(next(self._numbers), tokens, job.config)

    def _publish(self, job: Job, handle: Any) -> bool:
        """Whether it goes on."""
        if job.is_dropped:
            handle.stop()
            return False
        reason = None
        while handle.can_read():
            for output in handle.read().values():
                job.tell(list(output.generated_ids))
                reason = str(output.finish_reason).rpartition(".")[2].lower()
        if handle.get_status() == openvino_genai.GenerationStatus.RUNNING:
            return True
        job.tell(reason if reason in ("stop", "length") else "stop")
        return False


def config_of(body: dict[str, Any]) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = int(body.get("max_tokens") or 16)
    config.ignore_eos = bool(body.get("ignore_eos"))
    config.min_new_tokens = int(body.get("min_tokens") or 0)
    if temperature := float(body.get("temperature") or 0.0):
        config.do_sample, config.temperature = True, temperature
    return config


class Server:
    def __init__(self, stepper: Stepper, name: str) -> None:
        self._stepper = stepper
        self._pieces = Pieces(stepper.tokenizer)
        self._name = name
        self._numbers = itertools.count()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok" if self._stepper.is_alive() else "dead"},
                                 status=200 if self._stepper.is_alive() else 503)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body.get("prompt")
        is_ids = isinstance(prompt, list) and prompt and all(isinstance(one, int) for one in prompt)
        if not (isinstance(prompt, str) and prompt) and not is_ids:
            raise web.HTTPBadRequest(text=json.dumps({"error": {"message": "prompt: a text or a list of token ids"}}),
                                     content_type="application/json")
        job = Job(prompt, config_of(body), asyncio.get_running_loop())
        self._stepper.waiting.put(job)
        try:
            return await (self._stream(request, job, body) if body.get("stream") else self._whole(job))
        finally:
            job.is_dropped = True

    async def _whole(self, job: Job) -> web.Response:
        token_ids: list[int] = []
        while not isinstance(news := await job.news.get(), str):
            token_ids += news
        choice = {"index": 0, "text": self._pieces.of(token_ids).decode(errors="replace"), "finish_reason": news}
        return web.json_response(self._chunk(choice) | {"usage": _usage(job, len(token_ids))})

    async def _stream(self, request: web.Request, job: Job, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        await response.prepare(request)
        options = body.get("stream_options") or {}
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")    # keeps a part of a character back
        num_output, reason = 0, None
        while reason is None:
            news = await job.news.get()
            if isinstance(news, str):
                reason, news = news, []
            num_output += len(news)
            text = decoder.decode(self._pieces.of(news), final=reason is not None)
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
            if body.get("return_token_ids"):
                choice["token_ids"] = news
            chunk = self._chunk(choice)
            if options.get("continuous_usage_stats"):
                chunk["usage"] = _usage(job, num_output)
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if options.get("include_usage"):
            last = self._chunk(None) | {"usage": _usage(job, num_output)}
            await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        return {"id": f"cmpl-{next(self._numbers)}", "object": "text_completion", "created": int(time.time()),
                "model": self._name, "choices": [] if choice is None else [choice]}


def _usage(job: Job, num_output: int) -> dict[str, int]:
    return {"prompt_tokens": job.num_prompt_tokens, "completion_tokens": num_output,
            "total_tokens": job.num_prompt_tokens + num_output}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .gguf file, or a directory of OpenVINO's own format")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-num-seqs", type=int, default=32, help="requests running at once (default: 32)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=256, help="tokens of a step (default: 256)")
    parser.add_argument("--cache-size", type=int, default=2, help="GB of KV memory (default: 2)")
    parser.add_argument("--prefix-cache", action="store_true", help="reuse prefixes")
    options = parser.parse_args()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options.cache_size
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.max_num_batched_tokens = options.max_num_batched_tokens
    scheduler.enable_prefix_caching = options.prefix_cache
    stepper = Stepper(openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU"))
    stepper.start()
    server = Server(stepper, "openvino")
    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.get("/v1/models", server.models), web.get("/health", server.health),
                    web.post("/v1/completions", server.completions)])
    web.run_app(app, host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
