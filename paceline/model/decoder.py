"""Writes a decoder-only transformer as a program of verbs, once, at load. Packs the weights on the way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ..config import WEIGHT_FORMS
from ..errors import ConfigError, ModelError
from ..ops.interface import Backend, PackedLinear, SourceTensor
from ..ops.program import Buffer, KVPlace, Program, ProgramRecorder
from .layer_groups import layer_groups
from .rope import rope_table
from .spec import ModelSpec, Weights

Progress = Callable[[int, int], None]    # weights packed so far, weights in all

# dtype "auto": the smallest form that holds a source's own values, or comes closest (docs/formats.md has the errors).
AUTO_FORMS = {
    "F32": "f32", "BF16": "bf16", "F16": "bf16", "Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4", "Q5_0": "int8",
    "Q5_1": "int8", "Q2_K": "int8", "Q3_K": "int8", "Q4_K": "int4", "Q5_K": "int8", "Q6_K": "int8", "IQ4_NL": "int8",
    "MXFP4": "int8",
}

FORM_BITS = {"f32": 32, "bf16": 16, "int8": 8.5, "int4": 5}    # a weight, scales included


def form_of(source_type: str, dtype: str) -> str:
    """The packed form of a matrix: the named one, or with "auto" the source's own."""
    if dtype in WEIGHT_FORMS:
        return dtype
    if dtype != "auto":
        raise ConfigError(f"dtype={dtype!r} is unknown; choose from {['auto', *WEIGHT_FORMS]}")
    if source_type not in AUTO_FORMS:
        raise ModelError(f"weights of type {source_type} are not read; known: {list(AUTO_FORMS)}")
    return AUTO_FORMS[source_type]


def record_decoder(spec: ModelSpec, weights: Weights, backend: Backend, dtype: str, max_model_len: int,
                   progress: Progress | None = None) -> Program:
    """The program of one step. A tied head is the embedding's own packed weight."""
    if max_model_len > spec.max_position:
        raise ConfigError(f"max_model_len={max_model_len} exceeds the model's limit of {spec.max_position} tokens")
    recorder = ProgramRecorder(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size)
    packer = WeightPacker(weights, backend, dtype, recorder)
    packer.report_to(progress, num_matrix_weights(spec))
    writer = DecoderWriter(spec, recorder, packer, max_model_len)
    embedding = packer.matrix("embed", spec.vocab_size, spec.hidden_size)
    writer.embedding(embedding)
    for layer in range(spec.num_layers):
        writer.attention(layer)
        writer.mlp(layer)
    writer.head(embedding if spec.has_tied_head else packer.matrix("head", spec.vocab_size, spec.hidden_size))
    return recorder.finish()


class DecoderWriter:
    """Records the parts of the network. What is neutral (a scale of 1, no norm, no cap) is not recorded at all."""

    def __init__(self, spec: ModelSpec, recorder: ProgramRecorder, packer: WeightPacker, max_model_len: int) -> None:
        self.spec, self.recorder, self.packer = spec, recorder, packer
        self.buffers = DecoderBuffers(spec, recorder)
        factors = packer.array("rope_factors", spec.rotated_dims // 2) if spec.has_rope_factors else None
        self.rope = recorder.weight("rope", rope_table(
            max_model_len, spec.rotated_dims, spec.rope_theta, spec.rope_scaling, factors))
        self.window_rope = self.rope if spec.window_rope_theta is None else recorder.weight("window_rope", rope_table(
            max_model_len, spec.rotated_dims, spec.window_rope_theta, None, None))
        self.places = {layer: KVPlace(place, index, group.window)
                       for index, group in enumerate(layer_groups(spec, max_model_len))
                       for place, layer in enumerate(group.layers)}

    def embedding(self, weight: str) -> None:
        self.recorder.embed(weight, self.buffers.x)
        if self.spec.embedding_scale != 1.0:
            self.recorder.scale(self.buffers.x, self.spec.embedding_scale)

    def attention(self, layer: int) -> None:
        spec, buffers, at = self.spec, self.buffers, f"layers.{layer}."
        widths = {"q": spec.q_width, "k": spec.kv_width, "v": spec.kv_width}
        self.packer.linears(self._input(at + "attn_norm"), at, widths, buffers.qkv, spec.has_qkv_bias)
        self._norm_q_and_k(at)
        self.recorder.rope_write_kv(buffers.qkv, self._rope(layer), self.places[layer], buffers.q)
        scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        self.recorder.paged_attention(buffers.q, self.places[layer], scale, buffers.attended, spec.attention_softcap)
        self.packer.linears(buffers.attended, at, {"o": spec.hidden_size}, buffers.residual, spec.has_o_bias)
        self._add_output(at + "attn_post_norm")

    def mlp(self, layer: int) -> None:
        spec, buffers, at = self.spec, self.buffers, f"layers.{layer}."
        widths = {"gate": spec.intermediate_size, "up": spec.intermediate_size}
        self.packer.linears(self._input(at + "mlp_norm"), at, widths, buffers.gate_up, spec.has_mlp_bias)
        record = {"silu": self.recorder.silu_mul, "gelu_tanh": self.recorder.gelu_tanh_mul}[spec.activation]
        record(buffers.gate_up, buffers.activated)
        self.packer.linears(buffers.activated, at, {"down": spec.hidden_size}, buffers.residual, spec.has_mlp_bias)
        self._add_output(at + "mlp_post_norm")

    def head(self, weight: str) -> None:
        spec, buffers = self.spec, self.buffers
        self.recorder.select_wanted(buffers.x, buffers.last)
        self._norm(buffers.last, "final_norm", buffers.last_normed)
        self.recorder.linear(buffers.last_normed, weight, buffers.logits)
        if spec.logit_scale != 1.0:
            self.recorder.scale(buffers.logits, spec.logit_scale)
        if spec.logit_softcap is not None:
            self.recorder.softcap(buffers.logits, spec.logit_softcap)
        self.recorder.sample(buffers.logits)

    def _rope(self, layer: int) -> str | None:
        if layer in self.spec.unrotated_layers:
            return None
        has_window = bool(self.spec.windows) and self.spec.windows[layer] is not None    # however long the context
        return self.window_rope if has_window else self.rope

    def _input(self, norm: str) -> Buffer:
        """What a sublayer reads: the residual stream, normed unless norms come after only."""
        if self.spec.norm_placement == "after":
            return self.buffers.x
        return self._norm(self.buffers.x, norm, self.buffers.normed)

    def _add_output(self, norm: str) -> None:
        """A sublayer's output, normed where the spec says so, joins the residual stream."""
        output = self.buffers.residual
        if self.spec.norm_placement != "before":
            output = self._norm(output, norm, self.buffers.normed)
        self.recorder.add(self.buffers.x, output, self.spec.residual_scale)

    def _norm(self, x: Buffer, name: str, out: Buffer) -> Buffer:
        weight = self.packer.vector(name, self.spec.hidden_size)
        if self.spec.norm == "rms":
            return self.recorder.rms_norm(x, weight, self.spec.norm_eps, out)
        bias = self.packer.vector(name + "_bias", self.spec.hidden_size)
        return self.recorder.layer_norm(x, weight, bias, self.spec.norm_eps, out)

    def _norm_q_and_k(self, at: str) -> None:
        spec = self.spec
        for name, column, width in (("q_norm", 0, spec.q_width), ("k_norm", spec.q_width, spec.kv_width)):
            if spec.qk_norm != "none":
                slice_width = width if spec.qk_norm == "width" else spec.head_dim
                weight = self.packer.vector(at + name, slice_width)
                self.recorder.rms_norm_slices(self.buffers.qkv, weight, spec.norm_eps, column, width // slice_width)


class DecoderBuffers:
    """The buffers of a step; every layer uses the same ones."""

    def __init__(self, spec: ModelSpec, recorder: ProgramRecorder) -> None:
        self.x = recorder.buffer("tokens", spec.hidden_size)           # the residual stream
        self.normed = recorder.buffer("tokens", spec.hidden_size)
        self.qkv = recorder.buffer("tokens", spec.q_width + 2 * spec.kv_width)
        self.q = recorder.buffer("tokens", spec.q_width)
        self.attended = recorder.buffer("tokens", spec.q_width)
        self.residual = recorder.buffer("tokens", spec.hidden_size)    # what a sublayer adds to x
        self.gate_up = recorder.buffer("tokens", 2 * spec.intermediate_size)
        self.activated = recorder.buffer("tokens", spec.intermediate_size)
        self.last = recorder.buffer("wanted", spec.hidden_size)
        self.last_normed = recorder.buffer("wanted", spec.hidden_size)
        self.logits = recorder.buffer("wanted", spec.vocab_size)


class WeightPacker:
    """Takes weights by name, checks their shapes, packs them and enters them into the program.

    Each is asked for once and let go when packed: a Weights mapping may make its values on access.
    """

    def __init__(self, weights: Weights, backend: Backend, dtype: str, recorder: ProgramRecorder) -> None:
        self._weights, self._backend, self._dtype, self._recorder = weights, backend, dtype, recorder
        self._progress: Progress | None = None
        self._num_packed = self._num_total = 0

    def report_to(self, progress: Progress | None, num_total: int) -> None:
        self._progress, self._num_total = progress, num_total

    def vector(self, name: str, width: int) -> str:
        return self._recorder.weight(name, self._vector(name, width))

    def array(self, name: str, width: int) -> NDArray[np.float32]:
        """A vector that shapes the program without being part of it."""
        return self._vector(name, width)

    def matrix(self, name: str, num_outputs: int, num_inputs: int) -> str:
        return self._pack(name, [self._source(name, num_outputs, num_inputs)])

    def linears(self, x: Buffer, at: str, outputs: dict[str, int], out: Buffer, has_bias: bool = False) -> None:
        """Records x -> the named weights, side by side in `out`. Neighbours of one form become one stacked linear."""
        sources = {name: self._source(at + name, width, x.width) for name, width in outputs.items()}
        column = 0
        for _, run in groupby(outputs, key=lambda name: form_of(sources[name].source_type, self._dtype)):
            names = list(run)
            stacked = at + "_".join(names) if len(names) < 3 else at + "".join(names)    # gate_up, qkv
            weight = self._pack(stacked, [sources[name] for name in names])
            bias = self._stacked_bias(stacked, at, {name: outputs[name] for name in names}) if has_bias else None
            self._recorder.linear(x, weight, out, column, bias)
            column += sum(outputs[name] for name in names)

    def _stacked_bias(self, stacked: str, at: str, outputs: dict[str, int]) -> str:
        parts = [self._vector(f"{at}{name}_bias", width) for name, width in outputs.items()]
        return self._recorder.weight(stacked + "_bias", np.concatenate(parts))

    def _pack(self, name: str, sources: list[SourceTensor]) -> str:
        packed = self._backend.pack(sources, form_of(sources[0].source_type, self._dtype))
        self._num_packed += packed.num_outputs * packed.num_inputs
        if self._progress is not None:
            self._progress(self._num_packed, self._num_total)
        return self._recorder.weight(name, packed)

    def _source(self, name: str, num_outputs: int, num_inputs: int) -> SourceTensor:
        found = self._weights.get(name)
        if not isinstance(found, SourceTensor):
            raise ModelError(f"weight {name} is {'missing' if found is None else 'not a matrix'}")
        if (found.num_outputs, found.num_inputs) != (num_outputs, num_inputs):
            raise ModelError(f"weight {name} is [{found.num_outputs}, {found.num_inputs}], the model config says "
                             f"[{num_outputs}, {num_inputs}]")
        return found

    def _vector(self, name: str, width: int) -> NDArray[np.float32]:
        found = self._weights.get(name)
        if not isinstance(found, np.ndarray):
            raise ModelError(f"weight {name} is {'missing' if found is None else 'not a vector'}")
        if found.shape != (width,):
            raise ModelError(f"weight {name} has shape {found.shape}, the model config says ({width},)")
        return np.ascontiguousarray(found, dtype=np.float32)


def matrix_shapes(spec: ModelSpec) -> dict[str, tuple[int, int, int]]:
    """Canonical name ("layers.0." standing for all layers) -> outputs, inputs, how many there are."""
    hidden, inner, layers = spec.hidden_size, spec.intermediate_size, spec.num_layers
    shapes = {"q": (spec.q_width, hidden), "k": (spec.kv_width, hidden), "v": (spec.kv_width, hidden),
              "o": (hidden, spec.q_width),
              "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    outside = ("embed",) if spec.has_tied_head else ("embed", "head")
    return {**{"layers.0." + name: (*shape, layers) for name, shape in shapes.items()},
            **dict.fromkeys(outside, (spec.vocab_size, hidden, 1))}


def num_matrix_weights(spec: ModelSpec) -> int:
    return sum(outputs * inputs * count for outputs, inputs, count in matrix_shapes(spec).values())


def estimated_weights_bytes(spec: ModelSpec, weights: Weights, dtype: str) -> int:
    """Bytes the matrices will take once packed, known before they are; all layers taken to be like the first."""
    total = 0.0
    for name, (outputs, inputs, count) in matrix_shapes(spec).items():
        source = weights.get(name)
        if isinstance(source, SourceTensor):    # record_decoder refuses the others
            total += outputs * inputs * count * FORM_BITS[form_of(source.source_type, dtype)] / 8
    return int(total)


def weights_bytes(program: Program) -> int:
    """Bytes the packed weights and tables take in memory."""
    return sum(w.num_bytes if isinstance(w, PackedLinear) else w.nbytes for w in program.weights.values())
