"""The parts of a model's program that are timed by themselves, and the steps they are timed with.

A part is the program with the nodes of one kind only, in order, over all layers: what it reads from memory is what a
real step reads. Its inputs hold whatever its buffers hold: no kernel is faster for some values than for others, but
sample, which therefore gets the logits of the embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..ops.interface import ForwardBatch, KVSpec, PackedLinear, SamplingBatch
from ..ops.program import Node, Program

EXPERT_VERBS = ("route", "gather_routed", "expert_linear", "combine_routed")
ROW_VERBS = ("embed", "rms_norm", "layer_norm", "rms_norm_slices", "rope_write_kv", "silu_mul", "gelu_tanh_mul", "add",
             "add_gated", "scale", "softcap")
ZERO_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation has to do in one step. form: whose multiply-adds it uses; None where arithmetic is no limit."""

    num_bytes: int
    num_operations: int = 0
    form: str | None = None
    reads_memory: bool = True      # False: rows that are in a cache


def part_of(program: Program, keep: Callable[[Node], bool]) -> Program | None:
    """The program with only these nodes; None if there are none."""
    nodes = tuple(node for node in program.nodes if keep(node))
    names = {name for node in nodes for name in node.weights}
    if not nodes:
        return None
    return replace(program, nodes=nodes, weights={name: program.weights[name] for name in names})


def is_of_experts(program: Program, node: Node) -> bool:
    """Whether the node works on the rows of experts, or brings them there and back."""
    return node.verb in EXPERT_VERBS or (node.output is not None and rows_of(program, node.output) == "routed")


def is_of_wanted(program: Program, node: Node) -> bool:
    """Whether the node works on wanted positions only: the tail, or the last layer past its attention."""
    return node.output is None or rows_of(program, node.output) == "wanted"


def is_of_tail(program: Program, node: Node) -> bool:
    """Whether the node belongs to what follows the layers, or brings it the embedding's rows in their place."""
    embedding = next((one.output for one in program.nodes if one.verb == "embed"), None)
    if node.verb == "select_wanted":
        return node.inputs[0] == embedding
    layers_end = max((i for i, one in enumerate(program.nodes) if one.verb == "add"), default=-1)
    return is_of_wanted(program, node) and any(node is one for one in program.nodes[layers_end + 1:])


def rows_of(program: Program, buffer_id: int) -> str:
    return next(buffer.rows for buffer in program.buffers if buffer.buffer_id == buffer_id)


def width_of(program: Program, buffer_id: int) -> int:
    return next(buffer.width for buffer in program.buffers if buffer.buffer_id == buffer_id)


def linear_name(weight: PackedLinear) -> str:
    """What the step runner calls such a node."""
    return f"linear {weight.num_outputs}x{weight.num_inputs} {weight.form}"


def linear_work(program: Program, num_rows: int) -> dict[str, Work]:
    """By the runner's names, of a part with linears only: weights are read once, whatever the rows."""
    found: dict[str, Work] = {}
    for node in program.nodes:
        if node.verb != "linear":
            continue
        weight: PackedLinear = program.weights[node.weights[0]]
        before = found.get(linear_name(weight), Work(0))
        operations = 2 * weight.num_outputs * weight.num_inputs * num_rows
        found[linear_name(weight)] = Work(before.num_bytes + weight.num_bytes, before.num_operations + operations,
                                          weight.form)
    return found


def expert_work(program: Program, num_rows: int) -> Work:
    """No more experts are read than there are choices; how many exactly depends on the routes."""
    num_bytes = operations = 0
    for node in program.nodes:
        if node.verb == "expert_linear":
            weights = [program.weights[name] for name in node.weights]
            choices = num_rows * program.experts_per_token
            num_bytes += min(choices, len(weights)) * weights[0].num_bytes
            operations += 2 * weights[0].num_outputs * weights[0].num_inputs * choices
    form = next(weight.form for weight in program.weights.values() if isinstance(weight, PackedLinear))
    return Work(num_bytes, operations, form)


def attention_work(program: Program, kv: KVSpec, num_rows: int, tokens_per_row: int, num_keys: int) -> Work:
    """The keys and values that a row's queries see are read once; a query multiplies with those before it."""
    num_bytes = operations = 0
    bytes_per_key = kv.bytes_per_token // kv.num_layers
    for node in program.nodes:
        window = int(node.attrs.get("window", 0)) or num_keys
        seen = [min(position + 1, window) for position in range(num_keys - tokens_per_row, num_keys)]
        num_bytes += num_rows * min(num_keys, window + tokens_per_row - 1) * bytes_per_key
        operations += num_rows * 4 * program.num_heads * program.head_dim * sum(seen)
    return Work(num_bytes, operations, kv.dtype)


def row_work(program: Program, kv: KVSpec, num_rows: int) -> Work:
    """Floats in and out of rows that lie in a cache; what embed and rope_write_kv read and write is counted alike."""
    num_bytes = 0
    for node in program.nodes:
        buffers = [*node.inputs, *([] if node.output is None else [node.output])]
        num_bytes += 4 * num_rows * sum(width_of(program, buffer_id) for buffer_id in buffers)
        if node.verb == "rope_write_kv":
            num_bytes += num_rows * kv.bytes_per_token // kv.num_layers
    return Work(num_bytes, reads_memory=False)


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepShape:
    """num_rows requests with tokens_per_row tokens each, the last of which sees num_keys keys, itself included."""

    num_rows: int
    tokens_per_row: int
    num_keys: int
    temperature: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.tokens_per_row

    def num_blocks(self, block_size: int, num_groups: int) -> int:
        """Blocks that nobody shares, and the one that all others are copied from."""
        return 1 + self.num_rows * num_groups * -(-self.num_keys // block_size)


def step_batch(shape: StepShape, block_size: int, num_groups: int, vocab_size: int) -> ForwardBatch:
    """Random tokens at the end of their rows' contexts; the last token of each row wants logits."""
    first = shape.num_keys - shape.tokens_per_row
    positions = np.tile(np.arange(first, shape.num_keys, dtype=np.int32), shape.num_rows)
    row_starts = np.arange(shape.num_rows + 1, dtype=np.int32) * np.int32(shape.tokens_per_row)
    blocks_per_row = -(-shape.num_keys // block_size)
    tables = 1 + np.arange(num_groups * shape.num_rows * blocks_per_row, dtype=np.int32)
    token_ids = np.random.default_rng(0).integers(0, vocab_size, shape.num_tokens, dtype=np.int32)
    return ForwardBatch(
        token_ids, positions, row_starts, tables.reshape(num_groups, shape.num_rows, blocks_per_row),
        row_starts[1:] - np.int32(1), np.zeros((0, 2), np.int32), _sampling(shape))


def _sampling(shape: StepShape) -> SamplingBatch:
    def each(value: float, dtype: type) -> NDArray[Any]:
        return np.full(shape.num_rows, value, dtype)

    return SamplingBatch(
        temperature=each(shape.temperature, np.float32), top_k=each(0, np.int32),
        top_p=each(0.9 if shape.temperature else 1.0, np.float32), seed=each(7, np.uint64),
        prompt_index=each(0, np.uint32), choice_index=each(0, np.uint32), position=each(shape.num_keys, np.uint64),
        wants_logprob=each(0, np.uint8))


def copies_batch(num_copies: int, num_groups: int) -> ForwardBatch:
    """Nothing but copies: blocks 1 to num_copies become what ZERO_BLOCK holds."""
    nothing = StepShape(0, 0, 0)
    copies = np.array([(ZERO_BLOCK, block_id) for block_id in range(1, num_copies + 1)], np.int32)
    return replace(step_batch(nothing, 16, num_groups, 1), copies=copies.reshape(num_copies, 2))
