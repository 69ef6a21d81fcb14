"""A tiny random model, plans made by hand, and a loop that generates: the executor's tests need no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gguf
import numpy as np

from paceline.clock import VirtualClock
from paceline.kv.groups import FULL_ATTENTION, NULL_BLOCK, KVGroup
from paceline.model.decoder import record_decoder
from paceline.model.layer_groups import layer_groups
from paceline.model.spec import ModelSpec, Weights
from paceline.ops.cpu import CpuBackend, load_kernels
from paceline.ops.interface import Backend, ForwardBatch, KVSpec, SamplingBatch, SourceTensor
from paceline.ops.numpy_ops import NumpyBackend
from paceline.request import SamplingParams
from paceline.runner.executor import ModelExecutor
from paceline.sched.plan import (
    InputToken,
    SamplingRef,
    ScheduledRequest,
    SchedulerOutput,
    Transfer,
    TransferKind,
)

BACKENDS: dict[str, Callable[[], Backend]] = {"numpy": NumpyBackend}
if (kernels := load_kernels()) is not None:
    for path_name in kernels.paths():
        BACKENDS[f"cpu-{path_name}"] = lambda path=path_name: CpuBackend(path, num_threads=2)

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, logprobs=0)
RANDOM = SamplingParams(max_tokens=64, temperature=0.9, top_k=40, top_p=0.95, seed=11, logprobs=0)


def tiny_spec(**changes: Any) -> ModelSpec:
    shape = {
        "family": "tiny", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "vocab_size": 160, "max_position": 256, "norm_eps": 1e-5, "rope_theta": 10000.0,
        "has_tied_head": True,
    }
    return ModelSpec(**{**shape, **changes})


def encoded(name: str, values: np.ndarray, source_type: str) -> SourceTensor:
    """float32 values as a file of that type holds them."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[source_type])
    return SourceTensor(name, *values.shape, source_type=source_type, raw=raw.view(np.uint8).reshape(len(values), -1))


def random_weights(spec: ModelSpec, seed: int = 0, types: Callable[[str], str] = lambda name: "F32") -> Weights:
    """types: weight name without its layer -> source type."""
    rng = np.random.default_rng(seed)
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden = spec.hidden_size
    weights: dict[str, Any] = {}

    def matrix(prefix: str, name: str, outputs: int, inputs: int) -> None:
        values = rng.standard_normal((outputs, inputs)) * (1.0 if name == "embed" else 1.5 / np.sqrt(inputs))
        weights[prefix + name] = encoded(prefix + name, values, types(name))

    def vector(name: str, width: int, mean: float) -> None:
        weights[name] = (mean + 0.1 * rng.standard_normal(width)).astype(np.float32)

    matrix("", "embed", spec.vocab_size, hidden)
    vector("final_norm", hidden, 1.0)
    if not spec.has_tied_head:
        matrix("", "head", spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        at = f"layers.{layer}."
        vector(at + "attn_norm", hidden, 1.0)
        vector(at + "mlp_norm", hidden, 1.0)
        for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            matrix(at, name, width, hidden)
            if spec.has_qkv_bias:
                vector(f"{at}{name}_bias", width, 0.0)
        matrix(at, "o", hidden, q_width)
        for prefix, size in gated_mlps(spec, layer):
            matrix(at, prefix + "gate", size, hidden)
            matrix(at, prefix + "up", size, hidden)
            matrix(at, prefix + "down", hidden, size)
        if spec.has_experts(layer):
            matrix(at, "router", spec.num_experts, hidden)
            if spec.shared_intermediate_size:
                matrix(at, "shared_router", 1, hidden)
    return weights


def gated_mlps(spec: ModelSpec, layer: int) -> list[tuple[str, int]]:
    """Of a layer: what the names of their weights start with, and their size."""
    if not spec.has_experts(layer):
        return [("", spec.intermediate_size)]
    experts = [(f"experts.{expert}.", spec.expert_intermediate_size) for expert in range(spec.num_experts)]
    return experts + [("shared_", spec.shared_intermediate_size)] * bool(spec.shared_intermediate_size)


def kv_of(spec: ModelSpec, num_blocks: int = 40, block_size: int = 16, dtype: str = "bf16") -> KVSpec:
    num_layers = max(len(group.layers) for group in layer_groups(spec, spec.max_position))
    return KVSpec(num_layers, spec.num_kv_heads, spec.head_dim, block_size, num_blocks, dtype)


def groups_of(spec: ModelSpec) -> tuple[KVGroup, ...]:
    return tuple(KVGroup(group.window) for group in layer_groups(spec, spec.max_position))


def group_tables(block_ids: Sequence[int], groups: Sequence[KVGroup], computed: int) -> tuple[tuple[int, ...], ...]:
    """Tables of blocks of 16 tokens for every group: blocks of its own, and none behind its window."""
    return tuple(tuple(NULL_BLOCK if i < group.first_block(computed, 16) else 40 * index + block_id
                       for i, block_id in enumerate(block_ids)) for index, group in enumerate(groups))


def make_executor(kv: KVSpec | None = None, backend: Backend | None = None, spec: ModelSpec | None = None,
                  weights: Weights | None = None, dtype: str = "f32") -> ModelExecutor:
    spec, backend = spec or tiny_spec(), backend or NumpyBackend()
    program = record_decoder(spec, weights or random_weights(spec), backend, dtype, spec.max_position)
    kv = kv or kv_of(spec)
    return ModelExecutor(backend.bind(program, kv), kv, VirtualClock(), keep_logits=True,
                         num_groups=len(groups_of(spec)))


def row(request_id: str, computed: int, tokens: Sequence[InputToken], block_ids: tuple[int, ...],
        params: SamplingParams | None = GREEDY, wants: tuple[int, ...] | None = None) -> ScheduledRequest:
    """params None: a chunk that samples nothing. wants default: the last token."""
    wants = wants if wants is not None else (len(tokens) - 1,) if params else ()
    sampling = SamplingRef(params, 0, 0) if params else None
    return ScheduledRequest(request_id, computed, tuple(tokens), (block_ids,), wants, sampling)


def plan(*rows: ScheduledRequest, step_id: int = 0, copies: Sequence[tuple[int, int]] = ()) -> SchedulerOutput:
    transfers = [Transfer(i, TransferKind.COPY, 0, source, to) for i, (source, to) in enumerate(copies)]
    return SchedulerOutput(step_id, rows, tuple(transfers))


@dataclass
class Generation:
    """One request on its way: what it was given, what it drew, and the logits it drew from."""

    request_id: str
    tokens: list[int]
    block_ids: tuple[int, ...]
    num_new: int = 6
    params: SamplingParams = GREEDY
    num_computed: int = 0
    groups: tuple[KVGroup, ...] = FULL_ATTENTION
    logits: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.drawn) == self.num_new

    @property
    def outcome(self) -> tuple[list[int], list[float], list[bytes]]:
        """Equal only when every bit is."""
        return self.drawn, self.logprobs, self.logits

    def next_row(self, chunk: int) -> ScheduledRequest:
        end = min(self.num_computed + chunk, len(self.tokens))
        params = self.params if end == len(self.tokens) else None
        made = row(self.request_id, self.num_computed, self.tokens[self.num_computed : end], self.block_ids, params)
        return replace(made, block_ids=group_tables(self.block_ids, self.groups, self.num_computed))


def generate(executor: ModelExecutor, generations: Sequence[Generation], chunk: int = 1000,
             between_steps: Callable[[], None] = lambda: None) -> None:
    """Runs all of them together until each has drawn its tokens."""
    while running := [g for g in generations if not g.is_done]:
        rows = [g.next_row(chunk) for g in running]
        result = executor.collect(executor.submit(plan(*rows)))
        logits = iter(executor.last_logits if executor.last_logits is not None else ())
        for generation, done, outcome in zip(running, rows, result.rows, strict=True):
            generation.num_computed += done.num_tokens
            if outcome.token_ids:
                generation.drawn += outcome.token_ids
                generation.tokens += outcome.token_ids
                generation.logprobs += outcome.logprobs or ()
                generation.logits.append(next(logits).tobytes())
        between_steps()


def prompt(seed: int, length: int, vocab_size: int = 160) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def sampling_rows(num_rows: int, **columns: Any) -> SamplingBatch:
    """Equal sampling for every row; a keyword replaces a column (scalar or array)."""
    values = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "prompt_index": 0, "choice_index": 0,
              "position": 0, "wants_logprob": 1, **columns}
    dtypes = (np.float32, np.int32, np.float32, np.uint64, np.uint32, np.uint32, np.uint64, np.uint8)
    return SamplingBatch(*(np.broadcast_to(np.asarray(v), (num_rows,)).astype(dtype)
                           for v, dtype in zip(values.values(), dtypes, strict=True)))


def one_row_batch(token_ids: Sequence[int], start: int, block_ids: Sequence[int],
                  groups: Sequence[KVGroup] = FULL_ATTENTION) -> ForwardBatch:
    n = len(token_ids)
    tables = np.array(group_tables(block_ids, groups, start), np.int32)[:, None]
    return ForwardBatch(
        np.array(token_ids, np.int32), np.arange(start, start + n, dtype=np.int32), np.array([0, n], np.int32),
        tables, np.arange(n, dtype=np.int32), np.zeros((0, 2), np.int32), sampling_rows(n))
