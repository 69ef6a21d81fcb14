"""The reference backend: interprets a recorded program in float32 numpy. It is read, not raced.

Every verb works row by row, on arrays whose shapes depend on the row alone, so a row's bits never depend on the rows
beside it, on how a prompt was cut into steps, or on where its blocks lie. Weights are the packed form's values and keys
and values are rounded to the cache's dtype; activations are not rounded, where the compiled kernels may round them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dequantize import BF16_NAN, bf16_bits, from_bf16_bits
from .interface import ForwardBatch, KVSpec, PackedLinear, SourceTensor, StepOutput, stacked
from .numpy_pack import rounded_to_form
from .numpy_sampler import sample_reference
from .program import Node, Program

F32 = NDArray[np.float32]


class NumpyBackend:
    """Packs to the rounded values as float32 and runs programs in the interpreter below."""

    path_name = "numpy"

    def pack(self, sources: Sequence[SourceTensor], form: str) -> PackedLinear:
        values = np.concatenate([rounded_to_form(source, form) for source in sources])
        return PackedLinear(form, len(values), values.shape[1], values.nbytes, values, stacked(sources))

    def unpack(self, packed: PackedLinear) -> F32:
        values: F32 = packed.payload
        return values.copy()

    def bind(self, program: Program, kv: KVSpec) -> NumpyRunner:
        return NumpyRunner(program, kv)


class NumpyRunner:
    """A program bound to its KV memory."""

    def __init__(self, program: Program, kv: KVSpec) -> None:
        self.program = program
        self.cache = NumpyKVCache(kv)

    def step(self, batch: ForwardBatch, wants_logits: bool = False) -> StepOutput:
        for source, destination in batch.copies:
            self.cache.copy_block(source, destination)
        step = NumpyStep(self.program, self.cache, batch)
        for node in self.program.nodes:
            VERBS[node.verb](step, node)
        token_ids, logprobs, *best = step.sampled
        return StepOutput(token_ids, logprobs, step.logits if wants_logits else None, *best)

    def poison(self, block_ids: NDArray[np.int32]) -> None:
        """Fills blocks with NaN, so that a test notices whoever reads them."""
        self.cache.poison(block_ids)

    def close(self) -> None:
        self.cache = NumpyKVCache.empty()


class NumpyKVCache:
    """Keys and values, [block, layer, key or value, slot, head, dim], as float32 or as the bits of bfloat16."""

    def __init__(self, kv: KVSpec) -> None:
        self.spec = kv
        shape = (kv.num_blocks, kv.num_layers, 2, kv.block_size, kv.num_kv_heads, kv.head_dim)
        self.blocks: NDArray[Any] = np.zeros(shape, np.float32 if kv.dtype == "f32" else np.uint16)

    @classmethod
    def empty(cls) -> NumpyKVCache:
        return cls(KVSpec(0, 0, 0, 0, 0, "f32"))

    def copy_block(self, source: int, destination: int) -> None:
        self.blocks[destination] = self.blocks[source]

    def poison(self, block_ids: NDArray[np.int32]) -> None:
        self.blocks[block_ids] = np.nan if self.spec.dtype == "f32" else BF16_NAN

    def write(self, layer: int, block_id: int, slot: int, key: F32, value: F32) -> None:
        for which, heads in enumerate((key, value)):    # [Hk, D]
            self.blocks[block_id, layer, which, slot] = heads if self.spec.dtype == "f32" else bf16_bits(heads)

    def read(self, layer: int, block_ids: NDArray[np.int32], start: int, end: int) -> tuple[F32, F32]:
        """Keys and values of tokens [start, end) behind a block table, each [end - start, Hk, D]."""
        first, last = start // self.spec.block_size, -(-end // self.spec.block_size)
        gathered = self.blocks[block_ids[first:last], layer]    # [blocks, 2, slots, Hk, D]
        skipped = start - first * self.spec.block_size
        keys, values = (gathered[:, which].reshape(-1, *gathered.shape[3:])[skipped : skipped + end - start]
                        for which in (0, 1))
        if self.spec.dtype == "f32":
            return keys, values
        return from_bf16_bits(keys), from_bf16_bits(values)


class NumpyStep:
    """What the verbs of one step work on."""

    def __init__(self, program: Program, cache: NumpyKVCache, batch: ForwardBatch) -> None:
        self.program, self.cache, self.batch = program, cache, batch
        num_rows = {"tokens": len(batch.token_ids), "wanted": len(batch.wanted),
                    "routed": len(batch.token_ids) * program.experts_per_token}
        self.buffers = [np.zeros((num_rows[b.rows], b.width), dtype=np.float32) for b in program.buffers]
        self.row_of_token = np.repeat(np.arange(len(batch.row_starts) - 1), np.diff(batch.row_starts))
        self.sampled: tuple[Any, ...] = (np.zeros(len(batch.wanted), np.int32), np.zeros(len(batch.wanted), np.float32))
        self.logits: F32 | None = None

    def inputs(self, node: Node) -> list[F32]:
        return [self.buffers[buffer_id] for buffer_id in node.inputs]

    def output(self, node: Node) -> F32:
        assert node.output is not None
        return self.buffers[node.output]

    def matrix(self, node: Node, index: int = 0) -> F32:
        values: F32 = self.program.weights[node.weights[index]].payload
        return values

    def vector(self, node: Node, index: int = 0) -> F32:
        values: F32 = self.program.weights[node.weights[index]]
        return values

    def attr(self, node: Node, name: str) -> int:
        return int(node.attrs[name])

    def block_table(self, node: Node, token: int) -> NDArray[np.int32]:
        group = int(node.attrs.get("kv_group", 0))
        table: NDArray[np.int32] = self.batch.block_tables[group, self.row_of_token[token]]
        return table


def embed(step: NumpyStep, node: Node) -> None:
    step.output(node)[:] = step.matrix(node)[step.batch.token_ids]


def rms_norm(step: NumpyStep, node: Node) -> None:
    (x,), y, weight, eps = step.inputs(node), step.output(node), step.vector(node), np.float32(node.attrs["eps"])
    for t in range(len(x)):
        y[t] = rms_normed(x[t], weight, eps)


def rms_normed(x: F32, weight: F32, eps: np.float32) -> F32:
    normed: F32 = x / np.sqrt(np.mean(x * x) + eps) * weight
    return normed


def layer_norm(step: NumpyStep, node: Node) -> None:
    (x,), y, weight, eps = step.inputs(node), step.output(node), step.vector(node), np.float32(node.attrs["eps"])
    bias = step.vector(node, 1) if len(node.weights) > 1 else np.float32(0)
    for t in range(len(x)):
        centred = x[t] - np.mean(x[t])
        y[t] = centred / np.sqrt(np.mean(centred * centred) + eps) * weight + bias


def rms_norm_slices(step: NumpyStep, node: Node) -> None:
    x, weight, eps = step.output(node), step.vector(node), np.float32(node.attrs["eps"])
    first, width = step.attr(node, "first_column"), len(weight)
    for start in range(first, first + step.attr(node, "num_slices") * width, width):
        for t in range(len(x)):
            x[t, start : start + width] = rms_normed(x[t, start : start + width], weight, eps)


def linear(step: NumpyStep, node: Node) -> None:
    (x,), y, weight, first = step.inputs(node), step.output(node), step.matrix(node), step.attr(node, "out_column")
    bias = step.vector(node, 1) if len(node.weights) > 1 else None
    for t in range(len(x)):    # one matrix product over all rows would choose its order of summation by their number
        out = weight @ x[t]
        y[t, first : first + len(weight)] = out if bias is None else out + bias


def rope_write_kv(step: NumpyStep, node: Node) -> None:
    (qkv,), q_out, layer = step.inputs(node), step.output(node), step.attr(node, "layer")
    rope = step.vector(node) if node.weights else None
    num_heads, num_kv_heads = step.program.num_heads, step.program.num_kv_heads
    for t, position in enumerate(step.batch.positions):
        heads = qkv[t].reshape(num_heads + 2 * num_kv_heads, step.program.head_dim)
        q, k, v = np.split(heads, (num_heads, num_heads + num_kv_heads))
        angles = np.zeros(0, np.float32) if rope is None else rope[position]
        q_out[t] = rotate(q, angles).reshape(-1)
        block, slot = divmod(int(position), step.cache.spec.block_size)
        step.cache.write(layer, int(step.block_table(node, t)[block]), slot, rotate(k, angles), v)


def rotate(heads: F32, angles: F32) -> F32:
    """Turns the pair (first half i, second half i) of each head's first dims by angle i; angles = cosines then sines.
    The dims past len(angles) stay."""
    cos, sin = np.split(angles, 2)
    a, b, rest = np.split(heads, (len(cos), len(angles)), axis=1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=1)


def paged_attention(step: NumpyStep, node: Node) -> None:
    (q,), y, layer = step.inputs(node), step.output(node), step.attr(node, "layer")
    group = step.program.num_heads // step.program.num_kv_heads
    scale, cap = np.float32(node.attrs["scale"]), np.float32(node.attrs.get("softcap", 0))
    window = int(node.attrs.get("window", 0))
    for t, position in enumerate(step.batch.positions.tolist()):
        start = max(position + 1 - window, 0) if window else 0
        keys, values = step.cache.read(layer, step.block_table(node, t), start, position + 1)
        heads = q[t].reshape(step.program.num_heads, step.program.head_dim)
        attended = [attend(heads[h], keys[:, h // group], values[:, h // group], scale, cap)
                    for h in range(len(heads))]
        y[t] = np.concatenate(attended)


def attend(query: F32, keys: F32, values: F32, scale: np.float32, cap: np.float32) -> F32:
    """One head of one token over keys and values [context, D]."""
    scores = np.ascontiguousarray(keys) @ query * scale
    if cap:
        scores = np.tanh(scores / cap) * cap
    weights = np.exp(scores - scores.max())
    attended: F32 = weights / weights.sum() @ np.ascontiguousarray(values)
    return attended


def silu_mul(step: NumpyStep, node: Node) -> None:
    (gate_up,), y = step.inputs(node), step.output(node)
    for t in range(len(y)):
        gate, up = np.split(gate_up[t], 2)
        with np.errstate(over="ignore"):    # exp(-gate) = inf: silu is -0
            y[t] = gate / (np.float32(1) + np.exp(-gate)) * up


def gelu_tanh_mul(step: NumpyStep, node: Node) -> None:
    (gate_up,), y = step.inputs(node), step.output(node)
    for t in range(len(y)):
        gate, up = np.split(gate_up[t], 2)
        with np.errstate(over="ignore"):
            inner = np.float32(0.7978845608) * (gate + np.float32(0.044715) * gate * gate * gate)
        y[t] = np.float32(0.5) * gate * (np.float32(1) + np.tanh(inner)) * up


def add(step: NumpyStep, node: Node) -> None:
    x, y = step.inputs(node)
    x += y if "scale" not in node.attrs else y * np.float32(node.attrs["scale"])


def add_gated(step: NumpyStep, node: Node) -> None:
    x, y, gate = step.inputs(node)
    for t in range(len(x)):
        with np.errstate(over="ignore"):    # exp(-gate) = inf: the gate is shut
            x[t] += y[t] / (np.float32(1) + np.exp(-gate[t]))


def scale(step: NumpyStep, node: Node) -> None:
    step.output(node)[:] *= np.float32(node.attrs["factor"])


def softcap(step: NumpyStep, node: Node) -> None:
    x, cap = step.output(node), np.float32(node.attrs["cap"])
    for t in range(len(x)):
        x[t] = np.tanh(x[t] / cap) * cap


def route(step: NumpyStep, node: Node) -> None:
    (logits,), routes, k = step.inputs(node), step.output(node), step.attr(node, "top_k")
    for t in range(len(logits)):
        routes[t, :k], routes[t, k:] = chosen_experts(logits[t], k, bool(node.attrs["renormalise"]))


def chosen_experts(logits: F32, k: int, renormalise: bool) -> tuple[NDArray[np.int64], F32]:
    """Ids of the k experts, ascending, and their shares."""
    chosen = np.sort(np.argsort(-logits, kind="stable")[:k])
    with np.errstate(invalid="ignore"):    # a logit that is not finite makes all shares NaN, and the token's row
        shares = np.exp(logits - logits.max())
        shares = (shares / shares.sum())[chosen]
    return chosen, shares / shares.sum() if renormalise else shares


def routed_order(routes: F32) -> NDArray[np.int64]:
    """What each routed row is, as token * k + rank of the expert among the token's."""
    return np.argsort(routes[:, : routes.shape[1] // 2].reshape(-1), kind="stable")


def gather_routed(step: NumpyStep, node: Node) -> None:
    (x, routes), y = step.inputs(node), step.output(node)
    y[:] = x[routed_order(routes) // (routes.shape[1] // 2)]


def expert_linear(step: NumpyStep, node: Node) -> None:
    (x, routes), y, first = step.inputs(node), step.output(node), step.attr(node, "out_column")
    experts = np.sort(routes[:, : routes.shape[1] // 2].reshape(-1)).astype(np.int64)
    for r, expert in enumerate(experts):
        weight = step.matrix(node, expert)
        y[r, first : first + len(weight)] = weight @ x[r]


def combine_routed(step: NumpyStep, node: Node) -> None:
    (x, routes), y = step.inputs(node), step.output(node)
    k = routes.shape[1] // 2
    row_of_choice = np.argsort(routed_order(routes)).reshape(-1, k)
    for t in range(len(y)):
        y[t] = 0
        for rank in range(k):
            y[t] += routes[t, k + rank] * x[row_of_choice[t, rank]]


def select_wanted(step: NumpyStep, node: Node) -> None:
    (x,) = step.inputs(node)
    step.output(node)[:] = x[step.batch.wanted]


def sample(step: NumpyStep, node: Node) -> None:
    (step.logits,) = step.inputs(node)
    step.sampled = sample_reference(step.logits, step.batch.sampling)


VERBS: dict[str, Callable[[NumpyStep, Node], None]] = {
    f.__name__: f for f in (embed, rms_norm, layer_norm, rms_norm_slices, linear, rope_write_kv, paged_attention,
                            silu_mul, gelu_tanh_mul, add, add_gated, scale, softcap, route, gather_routed,
                            expert_linear, combine_routed, select_wanted, sample)
}
