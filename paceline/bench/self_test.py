"""How much this client can read on this machine: the ceiling under which its figures are the target's own.

A child process answers every request at once with a stream of small chunks; the client asks it in a closed loop, by the
same code as any server. What comes out is the client's limit, or the child's, if that is lower: a bound from below.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..errors import EngineError
from .load_generator import CellPlan, run_cell
from .metrics import summarise
from .records import Asked
from .targets import HttpOptions, HttpTarget

NUM_CLIENTS, NUM_REQUESTS, NUM_TOKENS = 32, 128, 200
CHUNK = b'data: {"choices":[{"index":0,"text":" x","finish_reason":null,"token_ids":[1]}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":" x","finish_reason":"length","token_ids":[1]}]}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
DEFINITION = (
    f"{NUM_CLIENTS} clients of a closed loop at a server that answers at once, {NUM_TOKENS} tokens a request, each "
    "chunk written by itself; server and client share this machine")


async def ceiling() -> dict[str, Any]:
    """Output tokens and requests a second that this client reads here. Raises EngineError where it cannot be found."""
    async with _echo() as url, HttpTarget(url, HttpOptions(model="echo")) as target:
        asked = [Asked(request_id=f"self-test-{number}", num_output_tokens=NUM_TOKENS, prompt_token_ids=(1,))
                 for number in range(NUM_REQUESTS)]
        result = await run_cell(target, asked, CellPlan(name="self-test", concurrency=NUM_CLIENTS))
    facts = summarise(result.records, result.facts())
    if facts["requests"]["failed"]:
        raise EngineError(f"the client's self-test failed: {facts['requests']['errors']}")
    rates = {name: facts["throughput"][name] for name in ("output_tokens_per_second", "requests_per_second")}
    return rates | {"core_share": facts["client"]["core_share"], "definition": DEFINITION}


@asynccontextmanager
async def _echo() -> AsyncIterator[str]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    try:
        port = (await child.stdout.readline()).strip().decode()
        if not port:
            raise EngineError("the client's self-test: its server did not start")
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        child.stdin.close()    # it ends with its input, so also when this process is killed
        await child.wait()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head, re.I)
    body = await reader.readexactly(int(length[1]) if length else 0)
    asked = re.search(rb'"max_tokens": *(\d+)', body)
    writer.write(HEAD)
    for _ in range(int(asked[1]) - 1 if asked else 0):
        writer.write(CHUNK)
        await writer.drain()
        await asyncio.sleep(0)    # one write a chunk, as a server's steps come
    writer.write(LAST)
    await writer.drain()
    writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve())
