"""The step runner on a small random model: what a request gets does not depend on how its steps were put together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.ops.program import KVPlace, Program, ProgramRecorder

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, LAYERS, POSITIONS = 64, 4, 2, 16, 96, 501, 2, 640


def record(kernels: ModuleType, form: str) -> Program:
    """Two layers of a llama, with weights of every kind this backend has if form is "mixed"."""
    rng = np.random.default_rng(11)
    forms = iter(["int8", "int4", "bf16", "f32"] * 4 if form == "mixed" else [form] * 16)

    def matrix(name: str, num_outputs: int, num_inputs: int) -> str:
        values = (rng.normal(size=(num_outputs, num_inputs)) / num_inputs**0.5).astype(np.float32)
        return recorder.weight(name, kernels.pack(next(forms), num_inputs, [("F32", values.view(np.uint8), None)]))

    def vector(name: str, size: int) -> str:
        return recorder.weight(name, rng.uniform(0.5, 1.5, size).astype(np.float32))

    angle = np.arange(POSITIONS)[:, None] * 100.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    recorder = ProgramRecorder(HEADS, KV_HEADS, DIM, VOCAB)
    rope = recorder.weight("rope", np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32))
    x, y, hidden = (recorder.buffer("tokens", HIDDEN) for _ in range(3))
    qkv = recorder.buffer("tokens", (HEADS + 2 * KV_HEADS) * DIM)
    q, attended = (recorder.buffer("tokens", HEADS * DIM) for _ in range(2))
    gate_up, inner = recorder.buffer("tokens", 2 * INNER), recorder.buffer("tokens", INNER)
    last, logits = recorder.buffer("wanted", HIDDEN), recorder.buffer("wanted", VOCAB)

    recorder.embed(matrix("embed", VOCAB, HIDDEN), x)
    for layer in range(LAYERS):
        recorder.rms_norm(x, vector(f"norm1.{layer}", HIDDEN), 1e-5, y)
        recorder.linear(y, matrix(f"q.{layer}", HEADS * DIM, HIDDEN), qkv, bias=vector(f"q_bias.{layer}", HEADS * DIM))
        recorder.linear(y, matrix(f"kv.{layer}", 2 * KV_HEADS * DIM, HIDDEN), qkv, out_column=HEADS * DIM)
        recorder.rope_write_kv(qkv, rope, KVPlace(layer), q)
        recorder.paged_attention(q, KVPlace(layer), DIM**-0.5, attended)
        recorder.linear(attended, matrix(f"o.{layer}", HIDDEN, HEADS * DIM), hidden)
        recorder.add(x, hidden)
        recorder.rms_norm(x, vector(f"norm2.{layer}", HIDDEN), 1e-5, y)
        recorder.linear(y, matrix(f"gate_up.{layer}", 2 * INNER, HIDDEN), gate_up)
        recorder.silu_mul(gate_up, inner)
        recorder.linear(inner, matrix(f"down.{layer}", HIDDEN, INNER), hidden)
        recorder.add(x, hidden)
    recorder.select_wanted(x, last)
    recorder.linear(last, matrix("head", VOCAB, HIDDEN), logits)
    recorder.sample(logits)
    return recorder.finish()


def bind(kernels: ModuleType, path: str, program: Program, num_threads: int = 1, block_size: int = 16,
         num_blocks: int = 64, dtype: str = "bf16", pages: str = "late", runs_ahead: bool = False) -> Any:
    buffers = [(b.buffer_id, b.rows, b.width) for b in program.buffers]
    nodes = [(n.verb, list(n.inputs), -1 if n.output is None else n.output, list(n.weights), dict(n.attrs))
             for n in program.nodes]
    kv = {"num_layers": LAYERS, "num_kv_heads": program.num_kv_heads, "head_dim": program.head_dim,
          "block_size": block_size, "num_blocks": num_blocks, "dtype": dtype, "pages": pages}
    return kernels.Runner(path, num_threads, buffers, nodes, dict(program.weights), program.num_heads,
                          program.num_kv_heads, program.head_dim, program.vocab_size, kv, runs_ahead)


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


class Requests:
    """A few requests on one runner: each keeps its tokens, its blocks and what it was given."""

    def __init__(self, runner: Any, prompts: Sequence[NDArray[np.int32]], block_size: int = 16, seed: int = 0,
                 temperature: float = 0.8, wants_logits: bool = True) -> None:
        self.runner, self.temperature, self.wants_logits = runner, temperature, wants_logits
        self.tokens = [list(prompt) for prompt in prompts]
        self.num_computed = [0] * len(prompts)
        self.logits: list[list[bytes]] = [[] for _ in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        blocks = 128 // block_size
        owners = np.random.default_rng(seed).permutation(len(prompts) * blocks).astype(np.int32)
        self.tables = owners.reshape(-1, blocks)
        runner.poison(self.tables.reshape(-1))

    def step(self, counts: dict[int, int], copies: NDArray[np.int32] | None = None) -> None:
        """Runs `counts` tokens of some requests; whoever has caught up gets a new token."""
        rows = list(counts)
        starts = np.concatenate([[0], np.cumsum(list(counts.values()))]).astype(np.int32)
        token_ids = [t for r in rows for t in self.tokens[r][self.num_computed[r] : self.num_computed[r] + counts[r]]]
        positions = [p for r in rows for p in range(self.num_computed[r], self.num_computed[r] + counts[r])]
        wanting = [i for i, r in enumerate(rows) if self.num_computed[r] + counts[r] == len(self.tokens[r])]
        w = len(wanting)
        ids, logprobs, logits = self.runner.step(
            ints(*token_ids), ints(*positions), starts, np.ascontiguousarray(self.tables[None, rows]),
            np.array([starts[i + 1] - 1 for i in wanting], np.int32),
            np.zeros((0, 2), np.int32) if copies is None else copies,
            np.full(w, self.temperature, np.float32), np.full(w, 50, np.int32), np.full(w, 0.95, np.float32),
            np.array([rows[i] + 100 for i in wanting], np.uint64), np.zeros(w, np.uint32), np.zeros(w, np.uint32),
            np.array([len(self.tokens[rows[i]]) for i in wanting], np.uint64), np.ones(w, np.uint8),
            wants_logits=self.wants_logits)[:3]
        for row, count in counts.items():
            self.num_computed[row] += count
        for at, (i, token, logprob) in enumerate(zip(wanting, ids, logprobs, strict=True)):
            self.tokens[rows[i]].append(int(token))
            self.logprobs[rows[i]].append(float(logprob))
            if self.wants_logits:
                self.logits[rows[i]].append(logits[at].tobytes())

    def generate(self, row: int, num_tokens: int, chunk: int = 1000) -> None:
        end = len(self.tokens[row]) + num_tokens
        while len(self.tokens[row]) < end:
            self.step({row: min(chunk, len(self.tokens[row]) - self.num_computed[row])})

    def outcome(self, row: int) -> tuple[list[int], list[bytes], list[float]]:
        return self.tokens[row], self.logits[row], self.logprobs[row]


def prompts(count: int = 5) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in (1, 40, 17, 64, 33)[:count]]


def alone(kernels: ModuleType, path: str, program: Program, dtype: str = "bf16") -> list[Any]:
    """Every prompt by itself, whole, on one thread: eight tokens each."""
    requests = Requests(bind(kernels, path, program, dtype=dtype), prompts())
    for row in range(len(requests.tokens)):
        requests.generate(row, 8)
        assert min(requests.tokens[row]) >= 0
    return [requests.outcome(row) for row in range(len(requests.tokens))]


def interpret(kernels: ModuleType, program: Program, token_ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Logits of every token of one row from position 0, in float64 and with no rounding at all."""
    values = {b.buffer_id: np.zeros((len(token_ids), b.width)) for b in program.buffers}
    weights = {name: (w if isinstance(w, np.ndarray) else kernels.unpack(w)).astype(np.float64)
               for name, w in program.weights.items()}
    cache: dict[Any, NDArray[np.float64]] = {}
    d, heads, kv_heads = program.head_dim, program.num_heads, program.num_kv_heads
    for node in program.nodes:
        x = values[node.inputs[0]] if node.inputs else None
        w = weights[node.weights[0]] if node.weights else None
        if node.verb == "embed":
            values[node.output] = w[token_ids]
        elif node.verb == "rms_norm":
            values[node.output] = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + node.attrs["eps"]) * w
        elif node.verb == "linear":
            at = int(node.attrs["out_column"])
            bias = weights[node.weights[1]] if len(node.weights) > 1 else 0.0
            values[node.output][:, at : at + len(w)] = x @ w.T + bias
        elif node.verb == "rope_write_kv":
            qkv = x.reshape(len(x), -1, d)
            cos, sin = np.split(w[: len(x), None], 2, axis=-1)
            low, high = np.split(qkv[:, : heads + kv_heads], 2, axis=-1)
            turned = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
            values[node.output] = turned[:, :heads].reshape(len(x), -1)
            cache[node.attrs["layer"]] = np.stack([turned[:, heads:], qkv[:, heads + kv_heads :]])
        elif node.verb == "paged_attention":
            k, v = cache[node.attrs["layer"]].repeat(heads // kv_heads, axis=2)
            scores = np.einsum("qhd,khd->hqk", x.reshape(len(x), heads, d), k) * node.attrs["scale"]
            scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
            p = np.exp(scores - scores.max(axis=-1, keepdims=True))
            values[node.output] = np.einsum("hqk,khd->qhd", p / p.sum(axis=-1, keepdims=True), v).reshape(len(x), -1)
        elif node.verb == "silu_mul":
            gate, up = np.split(x, 2, axis=1)
            values[node.output] = gate / (1 + np.exp(-gate)) * up
        elif node.verb == "add":
            values[node.output] = x + values[node.inputs[1]]
        elif node.verb == "select_wanted":
            values[node.output] = x.copy()
        else:
            return x
    raise AssertionError("no sample node")


# Root mean square of the logits' error over that of the logits: what rounding a linear's inputs and the cache costs.
STATED_ERROR = {("f32", "f32"): 2e-6, ("bf16", "bf16"): 0.015, ("int8", "bf16"): 0.04, ("int4", "bf16"): 0.04,
                ("mixed", "bf16"): 0.03}


@pytest.mark.parametrize("form, dtype", STATED_ERROR)
def test_a_step_computes_the_model(kernels: ModuleType, path: str, form: str, dtype: str) -> None:
    program = record(kernels, form)
    prompt = prompts()[3]
    runner = bind(kernels, path, program, dtype=dtype)
    n = len(prompt)
    got = step_of(runner, token_ids=prompt, positions=np.arange(n, dtype=np.int32), row_starts=ints(0, n),
                  block_tables=ints(3, 0, 2, 9)[None, None], wanted=np.arange(n, dtype=np.int32), wants_logits=True)[2]
    expected = interpret(kernels, program, prompt)
    assert (got - expected).std() < STATED_ERROR[form, dtype] * expected.std()


@pytest.mark.parametrize("form, dtype", [("mixed", "bf16"), ("mixed", "f32"), ("int8", "bf16"), ("int4", "bf16"),
                                         ("bf16", "bf16"), ("f32", "f32")])
def test_a_request_is_the_same_in_any_company(kernels: ModuleType, path: str, form: str, dtype: str) -> None:
    program = record(kernels, form)
    expected = alone(kernels, path, program, dtype)
    for num_threads, block_size, chunk in ((1, 16, 7), (2, 32, 16), (3, 64, 50)):
        runner = bind(kernels, path, program, num_threads, block_size, dtype=dtype)
        requests = Requests(runner, prompts(), block_size, seed=num_threads)
        while any(len(requests.tokens[r]) < len(expected[r][0]) for r in range(5)):
            requests.step({r: min(chunk, len(requests.tokens[r]) - requests.num_computed[r]) for r in range(5)
                           if len(requests.tokens[r]) < len(expected[r][0])})
        for row in range(5):
            assert requests.outcome(row) == expected[row], (num_threads, row)
        runner.close()


def test_many_rows_at_once_are_the_rows_alone(kernels: ModuleType, path: str) -> None:
    program = record(kernels, "mixed")
    expected = alone(kernels, path, program)
    order = [1, 3, 4, 2, 0, 1, 3]    # some prompts twice: 200 tokens in a step, beyond every row tile
    requests = Requests(bind(kernels, path, program, 2), [prompts()[i] for i in order])
    requests.step({row: len(requests.tokens[row]) for row in range(len(order))})
    for row, i in enumerate(order):
        assert requests.logits[row][0] == expected[i][1][0]


def test_a_thousand_steps_on_three_threads(kernels: ModuleType) -> None:
    path = kernels.paths()[0]
    program = record(kernels, "int8")
    single, pool = (Requests(bind(kernels, path, program, n), prompts(3)) for n in (1, 3))
    for requests in (single, pool):
        for step in range(1000):
            if step % 50 == 0:    # start over: recompute from the first token
                requests.num_computed = [0, 0, 0]
                requests.tokens = [list(prompt) for prompt in prompts(3)]
            row = step % 3
            requests.step({row: len(requests.tokens[row]) - requests.num_computed[row]})
    for row in range(3):
        assert pool.outcome(row) == single.outcome(row)


def test_a_copied_block_is_read_as_if_it_had_been_computed(kernels: ModuleType, path: str) -> None:
    program = record(kernels, "f32")
    prompt = prompts()[1]
    requests = Requests(bind(kernels, path, program), [prompt, prompt])
    requests.generate(0, 1)
    whole_blocks = 2
    copies = np.stack([requests.tables[0, :whole_blocks], requests.tables[1, :whole_blocks]], axis=1)
    requests.num_computed[1] = 16 * whole_blocks
    requests.step({1: len(prompt) - 16 * whole_blocks}, np.ascontiguousarray(copies))
    assert requests.logits[1][0] == requests.logits[0][0]


def test_a_step_of_prompt_chunks_only_samples_nothing(kernels: ModuleType, path: str) -> None:
    program = record(kernels, "int8")
    requests = Requests(bind(kernels, path, program, 2), prompts())
    requests.step({1: 20, 3: 30})
    assert requests.logits[1] == requests.logits[3] == []
    requests.generate(1, 8)
    assert requests.outcome(1) == alone(kernels, path, program)[1]


def test_an_empty_step_is_nothing(kernels: ModuleType, path: str) -> None:
    runner = bind(kernels, path, record(kernels, "f32"), 2)
    ids, logprobs, logits, *_ = step_of(runner, token_ids=ints(), positions=ints(), row_starts=ints(0),
                                    block_tables=np.zeros((1, 0, 4), np.int32), wanted=ints())
    assert len(ids) == len(logprobs) == 0 and logits is None


def step_of(runner: Any, **changes: Any) -> Any:
    """A good step of two rows, with some of its arrays replaced."""
    wanted = changes.get("wanted", ints(1, 2))
    w = len(wanted)
    arrays = {
        "token_ids": ints(1, 2, 3), "positions": ints(0, 1, 0), "row_starts": ints(0, 2, 3),
        "block_tables": np.array([[[0, 1], [2, 3]]], np.int32), "wanted": wanted, "copies": np.zeros((0, 2), np.int32),
        "temperature": np.zeros(w, np.float32), "top_k": np.zeros(w, np.int32), "top_p": np.ones(w, np.float32),
        "seed": np.zeros(w, np.uint64), "prompt_index": np.zeros(w, np.uint32), "choice_index": np.zeros(w, np.uint32),
        "position": np.zeros(w, np.uint64), "wants_logprob": np.zeros(w, np.uint8),
    }
    return runner.step(**{**arrays, **changes})


BAD_STEPS: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": ints(1, VOCAB, 3)}, f"token id {VOCAB} is outside the vocabulary"),
    ({"token_ids": ints(1, -1, 3)}, "token id -1"),
    ({"positions": ints(0, 2, 0)}, "positions of row 0 are not consecutive"),
    ({"positions": ints(0, 1, POSITIONS)}, f"position {POSITIONS} is outside the rope table"),
    ({"positions": ints(0, 1, -1)}, "position -1"),
    ({"positions": ints(0, 1, 32)}, "row 1 needs 3 blocks, its table has 2"),
    ({"positions": ints(0, 1)}, "positions: has 2 entries, needs 3"),
    ({"row_starts": ints(0, 4, 3)}, "row_starts must not decrease"),
    ({"row_starts": ints(1, 2, 3)}, "row_starts must go from 0"),
    ({"row_starts": ints(0, 2, 2)}, "row_starts must go from 0"),
    ({"row_starts": ints()}, "row_starts: needs one entry more"),
    ({"block_tables": np.array([[[0, 1], [64, 3]]], np.int32)}, "block id 64 of row 1"),
    ({"block_tables": np.array([[[-1, 1], [2, 3]]], np.int32)}, "block id -1 of row 0"),
    ({"block_tables": np.array([[[0, 1]]], np.int32)}, "block_tables: needs, for each group, one row for every row"),
    ({"wanted": ints(1, 3)}, "wanted must be ascending token indices below 3, got 3"),
    ({"wanted": ints(2, 1)}, "wanted must be ascending"),
    ({"wanted": ints(-1, 1)}, "wanted must be ascending"),
    ({"copies": np.array([[0, 64]], np.int32)}, "block id 64 of a copy"),
    ({"temperature": np.zeros(1, np.float32)}, "temperature: has 1 entries, needs 2"),
    ({"token_ids": np.zeros(3, np.int64)}, "token_ids: needs a C-contiguous array of int32"),
]


@pytest.mark.parametrize("changes, message", BAD_STEPS, ids=[message for _, message in BAD_STEPS])
def test_a_bad_index_is_refused_and_harms_nothing(kernels: ModuleType, changes: dict[str, Any], message: str) -> None:
    runner = bind(kernels, kernels.paths()[0], record(kernels, "f32"))
    good = step_of(runner, wants_logits=True)[2]
    with pytest.raises(ValueError, match=message):
        step_of(runner, **changes)
    assert step_of(runner, wants_logits=True)[2].tobytes() == good.tobytes()


def test_entries_past_a_rows_need_are_never_read(kernels: ModuleType, path: str) -> None:
    runner = bind(kernels, path, record(kernels, "f32"))
    tables = np.array([[[0, -7], [2, 10**6]]], np.int32)
    ids = step_of(runner, block_tables=tables)[0]
    assert ids.tolist() == step_of(runner)[0].tolist()


def one_node(kernels: ModuleType, node: tuple[Any, ...], width: int = 32, **kv_changes: Any) -> Any:
    """A runner for a program of one node over buffers 0, 1 (tokens) and 2 (wanted)."""
    values = np.zeros((96, 32), np.float32)
    weights = {"matrix": kernels.pack("f32", 32, [("F32", values.view(np.uint8), None)]),
               "norm": np.ones(32, np.float32), "rope": np.zeros((8, 16), np.float32)}
    kv = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 16, "block_size": 16, "num_blocks": 2, "dtype": "bf16"}
    buffers = [(0, "tokens", 32), (1, "tokens", width), (2, "wanted", 96)]
    return kernels.Runner(kernels.paths()[0], 1, buffers, [node], weights, 2, 1, 16, 96, {**kv, **kv_changes})


BAD_NODES: list[tuple[tuple[Any, ...], str]] = [
    (("softmax", [0], 1, [], {}), r"node 0 \(softmax\): unknown verb; choose from add, add_gated"),
    (("add", [0, 1], 0, [], {"gain": 2.0}), r"node 0 \(add\): unknown attribute gain"),
    (("scale", [0], 1, [], {"factor": 2.0}), r"node 0 \(scale\): its output must be its input"),
    (("softcap", [0], 0, [], {"cap": 0.0}), r"node 0 \(softcap\): cap must be positive"),
    (("layer_norm", [0], 1, ["norm", "rope"], {"eps": 1e-5}), r"node 0 \(layer_norm\): weight rope has shape 8 x 16"),
    (("rms_norm_slices", [0], 0, ["norm"], {"eps": 1e-5, "first_column": 1, "num_slices": 1}),
     r"node 0 \(rms_norm_slices\): 1 slices of 32 from column 1 do not fit buffer 0"),
    (("add", [0, 1], 1, [], {}), r"node 0 \(add\): its output must be its first input"),
    (("add", [0], 0, [], {}), r"node 0 \(add\): takes 2 inputs, got 1"),
    (("rms_norm", [0], 1, ["norm"], {}), r"node 0 \(rms_norm\): attribute eps is missing"),
    (("rms_norm", [0], 1, ["missing"], {"eps": 1e-5}), r"node 0 \(rms_norm\): unknown weight missing"),
    (("rms_norm", [0], 1, ["matrix"], {"eps": 1e-5}), r"node 0 \(rms_norm\): weight matrix must be a float32 array"),
    (("linear", [0], 1, ["norm"], {}), r"node 0 \(linear\): weight norm must be packed"),
    (("linear", [0], 1, ["matrix"], {}), r"node 0 \(linear\): columns 0 to 96 do not fit buffer 1"),
    (("linear", [0], 2, ["matrix"], {}), r"node 0 \(linear\): buffer 2 must have the rows of tokens"),
    (("linear", [7], 2, ["matrix"], {}), r"node 0 \(linear\): unknown buffer 7"),
    (("silu_mul", [0], 1, [], {}), r"node 0 \(silu_mul\): buffer 0 is 32 wide, needs 64"),
    (("rope_write_kv", [0], 1, ["rope"], {"layer": 0}), r"node 0 \(rope_write_kv\): buffer 0 is 32 wide, needs 64"),
    (("paged_attention", [0], 1, [], {"layer": 1, "scale": 1.0}), r"node 0 \(paged_attention\): layer is not one"),
    (("sample", [0], -1, [], {}), r"node 0 \(sample\): buffer 0 must have the rows of wanted"),
    (("embed", [], 1, ["matrix"], {"x": 1}), r"node 0 \(embed\): unknown attribute x"),
    (("select_wanted", [0], 2, [], {}), r"node 0 \(select_wanted\): buffer 2 is 96 wide, needs 32"),
]


@pytest.mark.parametrize("node, message", BAD_NODES, ids=[message for _, message in BAD_NODES])
def test_a_bad_program_is_refused_by_node(kernels: ModuleType, node: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_node(kernels, node)


def test_a_bad_cache_is_refused(kernels: ModuleType) -> None:
    good = ("add", [0, 1], 0, [], {})
    for changes, message in (({"block_size": 24}, "block_size must be 16, 32 or 64"), ({"dtype": "x"}, "dtype must be"),
                             ({"head_dim": 32}, "the cache's heads"), ({"leaves": 3}, "unknown entry leaves"),
                             ({"pages": "soon"}, "pages must be early or late")):
        with pytest.raises(ValueError, match=message):
            one_node(kernels, good, **changes)
    with pytest.raises(ValueError, match="path"):
        kernels.Runner("sse9", 1, [], [], {}, 2, 1, 16, 96, {"num_layers": 1, "num_kv_heads": 1, "head_dim": 16,
                                                            "block_size": 16, "num_blocks": 2, "dtype": "f32"})


def test_the_profile_counts_every_operation_of_a_step(kernels: ModuleType) -> None:
    runner = bind(kernels, kernels.paths()[0], record(kernels, "int8"))
    step_of(runner)
    runner.profile(True)
    for _ in range(3):
        step_of(runner)
    runner.profile(False)
    calls = {label: count for label, count, _ in runner.profile_report()}
    assert calls["paged_attention"] == 3 * LAYERS and calls["sample"] == 3
    assert calls[f"linear {VOCAB}x{HIDDEN} int8"] == 3
    assert all(seconds >= 0 for _, _, seconds in runner.profile_report())


def test_a_closed_runner_says_so(kernels: ModuleType) -> None:
    runner = bind(kernels, kernels.paths()[0], record(kernels, "f32"), 3)
    assert runner.kv_bytes == 64 * 16 * 2 * LAYERS * KV_HEADS * DIM * 2
    runner.close()
    runner.close()
    with pytest.raises(ValueError, match="closed"):
        step_of(runner)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere all of the pool is written at the start")
def test_early_pages_become_resident_by_themselves_and_change_no_bit(kernels: ModuleType, path: str) -> None:
    program = record(kernels, "int8")
    outcomes, num_blocks, grown = [], (64 << 20) // (16 * 2 * LAYERS * KV_HEADS * DIM * 2), {}
    for pages in ("late", "early"):
        before = resident_bytes()
        runner = bind(kernels, path, program, num_threads=2, num_blocks=num_blocks, pages=pages)
        requests = Requests(runner, prompts())    # written while its pages are touched
        for row in range(len(prompts())):
            requests.generate(row, 20)
        outcomes.append([requests.outcome(row) for row in range(len(prompts()))])
        deadline = time.monotonic() + 60
        while pages == "early" and resident_bytes() - before < 48 << 20 and time.monotonic() < deadline:
            os.sched_yield()
        grown[pages] = resident_bytes() - before
        runner.close()
    assert outcomes[0] == outcomes[1]
    assert grown["late"] < 16 << 20 and grown["early"] >= 48 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("pages", ["late", "early"])
def test_a_forked_process_is_refused_and_can_leave(kernels: ModuleType, pages: str) -> None:
    runner = bind(kernels, "portable", record(kernels, "int8"), num_threads=3, num_blocks=1 << 17, pages=pages)
    before = step_of(runner)
    child = os.fork()
    if child == 0:    # threads do not survive a fork: a step is refused, and freeing the runner waits for nobody
        signal.alarm(30)
        status = 1
        try:
            with pytest.raises(RuntimeError, match="forked"):
                step_of(runner)
            del runner
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert (step_of(runner)[0] == before[0]).all()


class Ahead(Requests):
    """Five requests in blocks of 16, of which twice as many are there: what a schedule may ask of the next step."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner, prompts(), wants_logits=False)
        self.free = [np.arange(40 + 8 * row, 48 + 8 * row, dtype=np.int32) for row in range(5)]
        runner.poison(np.arange(40, 80, dtype=np.int32))

    def step_rows(self, rows: Sequence[int], most: int = 1000, copies: NDArray[np.int32] | None = None) -> None:
        counts = {row: min(most, len(self.tokens[row]) - self.num_computed[row]) for row in rows
                  if len(self.tokens[row]) < 128}
        if counts:
            self.step(counts, copies)

    def do(self, action: tuple[str, int]) -> None:
        name, row = action
        if name == "without":     # a request has ended, or waits
            self.step_rows([r for r in range(5) if r != row])
        elif name == "alone":
            self.step_rows([row])
        elif name == "turned":    # another order of the rows
            self.step_rows([(r + row) % 5 for r in range(5)])
        elif name == "pieces":    # of whoever has more than one token to compute
            self.step_rows(range(5), most=3)
        elif name == "warmer":
            self.temperature = 1.3 - self.temperature
            self.step_rows(range(5))
        elif name == "moved":     # to other blocks, by a copy in the same step
            self.tables[row], self.free[row] = self.free[row], self.tables[row].copy()
            self.step_rows(range(5), copies=np.stack([self.free[row], self.tables[row]], axis=1))
        elif name == "preempted":    # computed anew, in other blocks; nobody may look at the old ones
            self.runner.poison(self.tables[row])
            self.tables[row], self.free[row] = self.free[row], self.tables[row].copy()
            self.num_computed[row] = 0
            self.step_rows(range(5))
        else:
            self.step_rows(range(5))


ACTIONS = ("all", "all", "all", "all", "without", "alone", "turned", "pieces", "warmer", "moved", "preempted")


@settings(max_examples=30, deadline=None)
@given(actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 4)), min_size=5, max_size=60))
def test_a_step_begun_unasked_changes_nothing(kernels: ModuleType, actions: list[tuple[str, int]]) -> None:
    program = record(kernels, "mixed")
    plain, ahead = (Ahead(bind(kernels, kernels.paths()[0], program, num_threads, num_blocks=80, runs_ahead=runs_ahead))
                    for num_threads, runs_ahead in ((1, False), (3, True)))
    for action in actions:
        plain.do(action)
        ahead.do(action)
    assert [plain.outcome(row) for row in range(5)] == [ahead.outcome(row) for row in range(5)]
    for one in (plain, ahead):
        one.runner.close()


def test_who_goes_on_finds_the_next_step_under_way(kernels: ModuleType, path: str) -> None:
    """Across the ends of blocks, whose successors nobody knew, and however many steps were given up before."""
    program = record(kernels, "int8")
    for num_threads, runs_ahead, num_joined in ((2, True, 38 + 19), (1, True, 0), (2, False, 0)):
        requests = Ahead(bind(kernels, path, program, num_threads, num_blocks=80, runs_ahead=runs_ahead))
        for _ in range(39):    # the first computes the prompts
            requests.do(("all", 0))
        requests.do(("without", 3))
        for _ in range(20):    # and the first of these is not what was begun after that one
            requests.do(("all", 0))
        assert requests.runner.num_joined == num_joined
        requests.runner.close()


def test_a_wrong_step_leaves_what_was_begun_behind_it(kernels: ModuleType, path: str) -> None:
    program = record(kernels, "int8")
    plain, ahead = (Ahead(bind(kernels, path, program, 2, num_blocks=80, runs_ahead=runs_ahead))
                    for runs_ahead in (False, True))
    for requests in (plain, ahead):
        requests.do(("all", 0))
        right = requests.tables[0].copy()
        requests.tables[0] = 80    # the first block behind the pool: a spare one, which is nobody's
        with pytest.raises(ValueError, match="block id 80 of row 0 is out of range"):
            requests.do(("all", 0))
        requests.tables[0] = right
        for _ in range(20):
            requests.do(("all", 0))
    assert [plain.outcome(row) for row in range(5)] == [ahead.outcome(row) for row in range(5)]


def test_a_step_that_differs_in_blocks_alone_is_another(kernels: ModuleType, path: str) -> None:
    program = record(kernels, "int8")
    outcomes = []
    for runs_ahead in (False, True):
        requests = Ahead(bind(kernels, path, program, 2, num_blocks=80, runs_ahead=runs_ahead))
        requests.tokens[0] = list(prompts()[3][::-1])    # as long as that of row 3
        for _ in range(3):
            requests.do(("all", 0))
        requests.tables[[0, 3]] = requests.tables[[3, 0]]    # all that follows is nonsense, and the same one
        requests.do(("all", 0))
        for _ in range(2):
            requests.do(("without", 2))
        requests.tables[2], requests.free[2] = requests.free[2], requests.tables[2].copy()
        requests.step_rows([0, 1, 3, 4], copies=np.stack([requests.free[2], requests.tables[2]], axis=1))
        for _ in range(3):
            requests.do(("all", 0))
        outcomes.append([requests.outcome(row) for row in range(5)])
        requests.runner.close()
    assert outcomes[0] == outcomes[1]
