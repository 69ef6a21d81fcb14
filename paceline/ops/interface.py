"""What a backend must offer: pack weights, then run a recorded program once a step. Knows arrays, not requests.

Arrays are C-contiguous numpy arrays. T tokens of R rows run in one step; W of the tokens want logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .program import Program


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A weight as its file holds it. Values are only touched when packed.

    source_type is "F32", "F16", "BF16" or a GGML block type ("Q4_1", "Q8_0", ...). raw is the file's bytes as uint8
    [num_outputs, bytes per output row], usually a view of a memory map. row_order, if given, is the output permutation
    to apply: packed row i is source row row_order[i] (undoes the q/k permutation of llama-type GGUF files). origin is
    the checkpoint's own format where source_type is already a conversion of it (AWQ, GPTQ, F8_E4M3).
    """

    name: str
    num_outputs: int
    num_inputs: int
    source_type: str
    raw: NDArray[np.uint8]
    row_order: NDArray[np.int64] | None = None
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight matrix [num_outputs, num_inputs] in one packed form: f32, bf16, int8 (groups of 32) or int4 (groups of
    32). payload belongs to the backend that packed it. sources: what it was stacked from, as (type of the file,
    outputs)."""

    form: str
    num_outputs: int
    num_inputs: int
    num_bytes: int
    payload: Any
    sources: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Geometry of the KV memory. Its blocks serve any group of layers; all groups have equally many."""

    num_layers: int        # of a group
    num_kv_heads: int
    head_dim: int
    block_size: int        # tokens a block holds
    num_blocks: int
    dtype: str             # f32 or bf16
    pages: str = "late"    # when the system gives the memory: as it is written, or early, in the background

    @property
    def bytes_per_block(self) -> int:
        return self.block_size * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * (4 if self.dtype == "f32" else 2)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists of different lengths, end to end: list i is values[starts[i] : starts[i + 1]]."""

    starts: NDArray[np.int32]            # [E + 1]
    values: NDArray[np.int32]

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.values[self.starts[index] : self.starts[index + 1]]


@dataclass(frozen=True, slots=True)
class SamplingExtras:
    """What only E of the wanted positions ask for. Every array has length E, every list E lists of token ids, except
    where it says otherwise."""

    rows: NDArray[np.int32]              # which wanted positions, ascending
    min_p: NDArray[np.float32]           # 0 = keep all
    typical_p: NDArray[np.float32]       # 1 = keep all
    repetition_penalty: NDArray[np.float32]    # 1 = none
    presence_penalty: NDArray[np.float32]      # 0 = none
    frequency_penalty: NDArray[np.float32]     # 0 = none
    num_prompt: NDArray[np.int32]        # so many tokens of the history are the prompt's
    num_top: NDArray[np.int32]           # best tokens whose raw log-probabilities are wanted
    target: NDArray[np.int32]            # this token is given and only scored; -1 = draw one
    history: Ragged                      # tokens before the one to be drawn; may be empty where nothing looks back
    allowed: Ragged                      # an empty list allows every token
    banned: Ragged
    biased: Ragged
    bias: NDArray[np.float32]            # one a token of biased.values


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the next token of each wanted position is drawn; every array has length W."""

    temperature: NDArray[np.float32]     # 0 = argmax
    top_k: NDArray[np.int32]             # 0 = whole vocabulary
    top_p: NDArray[np.float32]           # 1 = whole distribution
    seed: NDArray[np.uint64]
    prompt_index: NDArray[np.uint32]
    choice_index: NDArray[np.uint32]
    position: NDArray[np.uint64]         # of the token to be drawn: keys the randomness
    wants_logprob: NDArray[np.uint8]
    extras: SamplingExtras | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step as arrays."""

    token_ids: NDArray[np.int32]         # [T]
    positions: NDArray[np.int32]         # [T]
    row_starts: NDArray[np.int32]        # [R + 1]: tokens of row r are [row_starts[r], row_starts[r + 1])
    block_tables: NDArray[np.int32]      # [KV groups, R, most blocks of a row]; entries past a row's need, or behind a
                                         # window, are never read
    wanted: NDArray[np.int32]            # [W] token indices, ascending
    copies: NDArray[np.int32]            # [C, 2] block ids (source, destination), done first, in order
    sampling: SamplingBatch


@dataclass(frozen=True, slots=True)
class StepOutput:
    """token_ids [W] (-1: the row's logits were not finite), raw log-probabilities [W] (0 where not asked for), the
    logits [W, V] when wanted by the caller, and of a batch with extras the best tokens of each entry with their raw
    log-probabilities, [E, most num_top], best first, -1 and 0 past an entry's own number."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    logits: NDArray[np.float32] | None
    top_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None


class StepRunner(Protocol):
    """A program bound to its weights and its KV memory."""

    def step(self, batch: ForwardBatch, wants_logits: bool = False) -> StepOutput: ...

    def close(self) -> None: ...


def stacked(sources: Sequence[SourceTensor]) -> tuple[tuple[str, int], ...]:
    """PackedLinear.sources of what is packed together."""
    return tuple((source.origin or source.source_type, source.num_outputs) for source in sources)


class Backend(Protocol):
    """A numeric path."""

    @property
    def path_name(self) -> str:
        """Names the numeric path inside `system_fingerprint`: backend and instruction set."""
        ...

    def pack(self, sources: Sequence[SourceTensor], form: str) -> PackedLinear:
        """Packs matrices of equal num_inputs, stacked along the outputs in order, into one form.

        Lossless where the source's values allow it: F32 -> f32; BF16 -> bf16; Q8_0 -> int8; Q4_0, Q4_1 -> int4;
        anything -> f32. Otherwise the dequantised values are rounded to nearest (even) in the target form; int4
        chooses each group's scale and minimum first (numpy_pack.py).
        """
        ...

    def unpack(self, packed: PackedLinear) -> NDArray[np.float32]:
        """The values the kernels compute with, as float32 [num_outputs, num_inputs]."""
        ...

    def bind(self, program: Program, kv: KVSpec) -> StepRunner: ...
