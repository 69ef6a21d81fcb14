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

ROUTER_FORM = "f32"    # whatever the dtype: routers are small, and a rounding sends a token to another expert
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
        if layer + 1 == spec.num_layers and not spec.has_experts(layer):    # routed rows are those of all tokens
            writer.keep_wanted(writer.tokens.attended)
        writer.attention_output(layer)
        writer.mlp(layer)
    writer.head(embedding if spec.has_tied_head else packer.matrix("head", spec.vocab_size, spec.hidden_size))
    return recorder.finish()


class DecoderWriter:
    """Records the parts of the network. What is neutral (a scale of 1, no norm, no cap) is not recorded at all."""

    def __init__(self, spec: ModelSpec, recorder: ProgramRecorder, packer: WeightPacker, max_model_len: int) -> None:
        self.spec, self.recorder, self.packer = spec, recorder, packer
        self.buffers = DecoderBuffers(spec, recorder)
        self.tokens, self.wanted = StreamBuffers("tokens", spec, recorder), StreamBuffers("wanted", spec, recorder)
        self.stream = self.tokens
        factors = packer.array("rope_factors", spec.rotated_dims // 2) if spec.has_rope_factors else None
        self.rope = recorder.weight("rope", rope_table(
            max_model_len, spec.rotated_dims, spec.rope_theta, spec.rope_scaling, factors))
        self.window_rope = self.rope if spec.window_rope_theta is None else recorder.weight("window_rope", rope_table(
            max_model_len, spec.rotated_dims, spec.window_rope_theta, None, None))
        self.places = {layer: KVPlace(place, index, group.window)
                       for index, group in enumerate(layer_groups(spec, max_model_len))
                       for place, layer in enumerate(group.layers)}

    def embedding(self, weight: str) -> None:
        self.recorder.embed(weight, self.stream.x)
        if self.spec.embedding_scale != 1.0:
            self.recorder.scale(self.stream.x, self.spec.embedding_scale)

    def attention(self, layer: int) -> None:
        spec, buffers, at = self.spec, self.buffers, f"layers.{layer}."
        widths = {"q": spec.q_width, "k": spec.kv_width, "v": spec.kv_width}
        self.packer.linears(self._input(at + "attn_norm"), at, widths, buffers.qkv, spec.has_qkv_bias)
        self._norm_q_and_k(at)
        self.recorder.rope_write_kv(buffers.qkv, self._rope(layer), self.places[layer], buffers.q)
        scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        self.recorder.paged_attention(buffers.q, self.places[layer], scale, self.stream.attended,
                                      spec.attention_softcap)

    def attention_output(self, layer: int) -> None:
        spec, stream, at = self.spec, self.stream, f"layers.{layer}."
        self.packer.linears(stream.attended, at, {"o": spec.hidden_size}, stream.residual, spec.has_o_bias)
        self._add_output(at + "attn_post_norm")

    def keep_wanted(self, *others: Buffer) -> None:
        """Only wanted tokens go on, in x and the others: past the last attention nobody looks at the rest."""
        targets = {self.tokens.x: self.wanted.x, self.tokens.attended: self.wanted.attended}
        for buffer in (self.tokens.x, *others):
            self.recorder.select_wanted(buffer, targets[buffer])
        self.stream = self.wanted

    def mlp(self, layer: int) -> None:
        spec, at = self.spec, f"layers.{layer}."
        x = self._input(at + "mlp_norm")
        if spec.has_experts(layer):
            self._experts(x, at)
        else:
            self._gated_mlp(x, at, "", spec.intermediate_size, self.stream.residual)
        self._add_output(at + "mlp_post_norm")

    def _gated_mlp(self, x: Buffer, at: str, which: str, size: int, out: Buffer) -> None:
        has_bias = self.spec.has_mlp_bias and not which
        gate_up, activated = self.buffers.gated(self.stream.rows, size)
        self.packer.linears(x, at, {which + "gate": size, which + "up": size}, gate_up, has_bias)
        self._activate(gate_up, activated)
        self.packer.linears(activated, at, {which + "down": self.spec.hidden_size}, out, has_bias)

    def _activate(self, gate_up: Buffer, activated: Buffer) -> None:
        record = {"silu": self.recorder.silu_mul, "gelu_tanh": self.recorder.gelu_tanh_mul}[self.spec.activation]
        record(gate_up, activated)

    def _experts(self, x: Buffer, at: str) -> None:
        """What a token's experts make of it, weighted; beside them the shared expert, if there is one."""
        spec, recorder, buffers = self.spec, self.recorder, self.buffers.routed()
        size, count = spec.expert_intermediate_size, spec.num_experts
        gate_up, activated = self.buffers.gated("routed", size)
        recorder.linear(x, self._router(at + "router", count), buffers.logits)
        recorder.route(buffers.logits, spec.experts_per_token, spec.has_renormalised_shares, buffers.routes)
        recorder.gather_routed(x, buffers.routes, buffers.x)
        self.packer.expert_linears(buffers.x, buffers.routes, at, {"gate": size, "up": size}, gate_up, count)
        self._activate(gate_up, activated)
        self.packer.expert_linears(activated, buffers.routes, at, {"down": spec.hidden_size}, buffers.x, count)
        recorder.combine_routed(buffers.x, buffers.routes, self.stream.residual)
        if spec.shared_intermediate_size:
            shared, gate = buffers.shared, buffers.shared_gate
            recorder.linear(x, self._router(at + "shared_router", 1), gate)
            self._gated_mlp(x, at, "shared_", spec.shared_intermediate_size, shared)
            recorder.add_gated(self.stream.residual, shared, gate)

    def _router(self, name: str, num_outputs: int) -> str:
        return self.packer.matrix(name, num_outputs, self.spec.hidden_size, ROUTER_FORM)

    def head(self, weight: str) -> None:
        spec, buffers = self.spec, self.buffers
        if self.stream is self.tokens:
            self.keep_wanted()
        self._norm(self.stream.x, "final_norm", self.stream.normed)
        self.recorder.linear(self.stream.normed, weight, buffers.logits)
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
            return self.stream.x
        return self._norm(self.stream.x, norm, self.stream.normed)

    def _add_output(self, norm: str) -> None:
        """A sublayer's output, normed where the spec says so, joins the residual stream."""
        output = self.stream.residual
        if self.spec.norm_placement != "before":
            output = self._norm(output, norm, self.stream.normed)
        self.recorder.add(self.stream.x, output, self.spec.residual_scale)

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


class StreamBuffers:
    """What the layers hand on: of all tokens, or past the last attention of those wanted."""

    def __init__(self, rows: str, spec: ModelSpec, recorder: ProgramRecorder) -> None:
        self.rows = rows
        self.x = recorder.buffer(rows, spec.hidden_size)           # the residual stream
        self.normed = recorder.buffer(rows, spec.hidden_size)
        self.attended = recorder.buffer(rows, spec.q_width)
        self.residual = recorder.buffer(rows, spec.hidden_size)    # what a sublayer adds to x


class DecoderBuffers:
    """The other buffers of a step; every layer uses the same ones."""

    def __init__(self, spec: ModelSpec, recorder: ProgramRecorder) -> None:
        self.qkv = recorder.buffer("tokens", spec.q_width + 2 * spec.kv_width)
        self.q = recorder.buffer("tokens", spec.q_width)
        self.logits = recorder.buffer("wanted", spec.vocab_size)
        self._spec, self._recorder = spec, recorder
        self._gated: dict[tuple[str, int], tuple[Buffer, Buffer]] = {}
        self._routed: RoutedBuffers | None = None

    def gated(self, rows: str, size: int) -> tuple[Buffer, Buffer]:
        """Of a gated MLP: gate and up side by side, and their activated product. Made where a layer needs them."""
        if (rows, size) not in self._gated:
            self._gated[rows, size] = self._recorder.buffer(rows, 2 * size), self._recorder.buffer(rows, size)
        return self._gated[rows, size]

    def routed(self) -> RoutedBuffers:
        if self._routed is None:
            self._routed = RoutedBuffers(self._spec, self._recorder)
        return self._routed


class RoutedBuffers:
    """What routing to experts needs, and the shared expert where there is one."""

    def __init__(self, spec: ModelSpec, recorder: ProgramRecorder) -> None:
        self.logits = recorder.buffer("tokens", spec.num_experts)
        self.routes = recorder.buffer("tokens", 2 * spec.experts_per_token)
        self.x = recorder.buffer("routed", spec.hidden_size)    # what goes into the experts, then what comes out
        if spec.shared_intermediate_size:
            self.shared = recorder.buffer("tokens", spec.hidden_size)
            self.shared_gate = recorder.buffer("tokens", 1)


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

    def matrix(self, name: str, num_outputs: int, num_inputs: int, form: str | None = None) -> str:
        """form None: as dtype says."""
        source = self._source(name, num_outputs, num_inputs)
        return self._pack(name, [source], form or self._form(source))

    def linears(self, x: Buffer, at: str, outputs: dict[str, int], out: Buffer, has_bias: bool = False) -> None:
        """Records x -> the named weights, side by side in `out`. Neighbours of one form become one stacked linear."""
        sources = self._sources(at, outputs, x.width)
        column = 0
        for form, run in groupby(outputs, key=lambda name: self._form(sources[name])):
            names = list(run)
            stacked = at + "_".join(names) if len(names) < 3 else at + "".join(names)    # gate_up, qkv
            weight = self._pack(stacked, [sources[name] for name in names], form)
            bias = self._stacked_bias(stacked, at, {name: outputs[name] for name in names}) if has_bias else None
            self._recorder.linear(x, weight, out, column, bias)
            column += sum(outputs[name] for name in names)

    def expert_linears(self, x: Buffer, routes: Buffer, at: str, outputs: dict[str, int], out: Buffer,
                       num_experts: int) -> None:
        """The same for every expert of a layer. A weight has one form in all of them."""
        first = self._sources(f"{at}experts.0.", outputs, x.width)
        column = 0
        for form, run in groupby(outputs, key=lambda name: self._form(first[name])):
            widths = {name: outputs[name] for name in run}
            weights = []
            for expert in range(num_experts):
                prefix = f"{at}experts.{expert}."
                sources = self._sources(prefix, widths, x.width) if expert else {name: first[name] for name in widths}
                for name, source in sources.items():
                    if self._form(source) != form:
                        raise ModelError(f"weight {prefix}{name} would be {self._form(source)} and expert 0's {form}: "
                                         "name a dtype for all")
                weights.append(self._pack(prefix + "_".join(widths), list(sources.values()), form))
            self._recorder.expert_linear(x, routes, tuple(weights), out, column)
            column += sum(widths.values())

    def _sources(self, at: str, outputs: dict[str, int], num_inputs: int) -> dict[str, SourceTensor]:
        return {name: self._source(at + name, width, num_inputs) for name, width in outputs.items()}

    def _form(self, source: SourceTensor) -> str:
        return form_of(source.source_type, self._dtype)

    def _stacked_bias(self, stacked: str, at: str, outputs: dict[str, int]) -> str:
        parts = [self._vector(f"{at}{name}_bias", width) for name, width in outputs.items()]
        return self._recorder.weight(stacked + "_bias", np.concatenate(parts))

    def _pack(self, name: str, sources: list[SourceTensor], form: str) -> str:
        packed = self._backend.pack(sources, form)
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
    """A canonical name, standing for all weights of its kind -> outputs, inputs, how many there are."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention = {"q": (spec.q_width, hidden), "k": (spec.kv_width, hidden), "v": (spec.kv_width, hidden),
                 "o": (hidden, spec.q_width)}
    shapes = {"layers.0." + name: (*shape, spec.num_layers) for name, shape in attention.items()}
    routed = [layer for layer in range(spec.num_layers) if spec.has_experts(layer)]
    dense = [layer for layer in range(spec.num_layers) if not spec.has_experts(layer)]
    if dense:
        shapes |= _gated_shapes(f"layers.{dense[0]}.", inner, hidden, len(dense))
    if routed:
        at, count = f"layers.{routed[0]}.", len(routed)
        shapes[at + "router"] = (spec.num_experts, hidden, count)
        shapes |= _gated_shapes(at + "experts.0.", spec.expert_intermediate_size, hidden, count * spec.num_experts)
        if spec.shared_intermediate_size:
            shapes[at + "shared_router"] = (1, hidden, count)
            shapes |= _gated_shapes(at + "shared_", spec.shared_intermediate_size, hidden, count)
    outside = ("embed",) if spec.has_tied_head else ("embed", "head")
    return {**shapes, **dict.fromkeys(outside, (spec.vocab_size, hidden, 1))}


def _gated_shapes(at: str, inner: int, hidden: int, count: int) -> dict[str, tuple[int, int, int]]:
    return {at + "gate": (inner, hidden, count), at + "up": (inner, hidden, count), at + "down": (hidden, inner, count)}


def num_matrix_weights(spec: ModelSpec) -> int:
    return sum(outputs * inputs * count for outputs, inputs, count in matrix_shapes(spec).values())


def num_active_weights(spec: ModelSpec) -> int:
    """Those that one token is multiplied with, the embedding counted in full as is the custom."""
    idle = spec.num_experts - spec.experts_per_token
    return sum(outputs * inputs * (count - count * idle // spec.num_experts if ".experts." in name else count)
               for name, (outputs, inputs, count) in matrix_shapes(spec).items())


def estimated_weights_bytes(spec: ModelSpec, weights: Weights, dtype: str) -> int:
    """Bytes the matrices will take once packed, known before they are; all layers taken to be like the first."""
    total = 0.0
    for name, (outputs, inputs, count) in matrix_shapes(spec).items():
        source = weights.get(name)
        if isinstance(source, SourceTensor):    # record_decoder refuses the others
            form = ROUTER_FORM if name.endswith("router") else form_of(source.source_type, dtype)
            total += outputs * inputs * count * FORM_BITS[form] / 8
    return int(total)


def weights_bytes(program: Program) -> int:
    """Bytes the packed weights and tables take in memory."""
    return sum(w.num_bytes if isinstance(w, PackedLinear) else w.nbytes for w in program.weights.values())
