"""The recorded program: verbs over buffers, written once at load by model/decoder.py and run every step.

A buffer is float32 [rows, width], rows being the step's tokens ("tokens", T), the tokens whose logits are wanted
("wanted", W) or the tokens once for each of the k experts chosen for them ("routed", T k, by expert, then by token).
The verbs, with their inputs -> output:

  embed            weight packed [V, H]                       -> x [T, H]      x[t] = weight[token_ids[t]]
  rms_norm         x [*, H], weight f32 [H], eps              -> y [*, H]      y = x / sqrt(mean(x^2) + eps) * weight
  layer_norm       x [*, H], weight f32 [H], bias f32 [H]?, eps
                                                              -> y [*, H]      y = (x - mean) / sqrt(var + eps) * weight
                   + bias
  rms_norm_slices  x [*, M], weight f32 [S], eps              -> x             num_slices slices of S columns from
                   first_column on, each an rms_norm of its own
  linear           x [*, K], packed [N, K], bias f32 [N]?     -> columns [out_column, out_column + N) of y [*, M]
  rope_write_kv    qkv [T, (Hq + 2 Hk) D], rope f32 [P, R]?   -> q [T, Hq D]
                   rotates halves of the first R dims of a head (rope[p] = cos[R/2] then sin[R/2] at position p; nothing
                   without a table), writes rotated k and v to the cache of `layer` in the cache's dtype; the layer is
                   one of group `kv_group`, 0 unless given, whose block tables it goes by
  paged_attention  q [T, Hq D]                                -> y [T, Hq D]
                   causal, over the cache of `layer`, GQA, scores times `scale`, then softcap(scores) where given; with
                   a `window`, over the last `window` tokens only, the query's own included
  silu_mul         gate_up [T, 2 I]                           -> y [T, I]      y = silu(gate) * up
  gelu_tanh_mul    gate_up [T, 2 I]                           -> y [T, I]      y = gelu_tanh(gate) * up
  add              x [T, H], y [T, H]                         -> x             x += scale * y, scale 1 unless given
  add_gated        x [T, H], y [T, H], gate [T, 1]            -> x             x += sigmoid(gate) * y
  scale            x [*, H], factor                           -> x             x *= factor
  softcap          x [*, H], cap                              -> x             x = cap * tanh(x / cap)
  route            logits [T, E], top_k k, renormalise        -> routes [T, 2 k]
                   ids of the experts with the k largest logits, ascending (of equal logits the lowest ids), then their
                   shares: softmax over all E logits, divided by the sum of the k where renormalise is 1
  gather_routed    x [T, H], routes                           -> y [T k, H]    each token's row, for every expert it has
  expert_linear    x [T k, K], routes, E x packed [N, K]      -> columns [out_column, out_column + N) of y [T k, M]
                   a row times the weight of its expert
  combine_routed   x [T k, H], routes                         -> y [T, H]      a token's rows times their shares, added
                   up in the order of the experts' ids
  select_wanted    x [T, H]                                   -> y [W, H]
  sample           logits [W, V]                              -> (token ids and log-probabilities of the step)

Block copies of a step run before its first node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VERBS = (
    "embed", "rms_norm", "layer_norm", "rms_norm_slices", "linear", "rope_write_kv", "paged_attention", "silu_mul",
    "gelu_tanh_mul", "add", "add_gated", "scale", "softcap", "route", "gather_routed", "expert_linear",
    "combine_routed", "select_wanted", "sample",
)


@dataclass(frozen=True, slots=True)
class Buffer:
    buffer_id: int
    rows: str      # "tokens", "wanted" or "routed"
    width: int


@dataclass(frozen=True, slots=True)
class KVPlace:
    """Where a layer's keys and values lie: which layer of which KV group, and how far its queries look back."""

    layer: int
    kv_group: int = 0
    window: int | None = None

    def attrs(self) -> dict[str, int]:
        return {"layer": self.layer} | ({"kv_group": self.kv_group} if self.kv_group else {})


@dataclass(frozen=True, slots=True)
class Node:
    """One verb. weights are keys into Program.weights; attrs are plain numbers."""

    verb: str
    inputs: tuple[int, ...]
    output: int | None
    weights: tuple[str, ...] = ()
    attrs: Mapping[str, float | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Program:
    """weights: PackedLinear for matrices, float32 ndarrays for vectors and tables."""

    buffers: tuple[Buffer, ...]
    nodes: tuple[Node, ...]
    weights: Mapping[str, Any]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def experts_per_token(self) -> int:
        """The k of every route verb; 0 without one."""
        return max((int(node.attrs["top_k"]) for node in self.nodes if node.verb == "route"), default=0)


class ProgramRecorder:
    """Writes a Program: one method a verb, each returning the buffer it fills."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int) -> None:
        self._shape = (num_heads, num_kv_heads, head_dim, vocab_size)
        self._buffers: list[Buffer] = []
        self._nodes: list[Node] = []
        self._weights: dict[str, Any] = {}

    def buffer(self, rows: str, width: int) -> Buffer:
        made = Buffer(len(self._buffers), rows, width)
        self._buffers.append(made)
        return made

    def weight(self, name: str, value: Any) -> str:
        self._weights[name] = value
        return name

    def embed(self, weight: str, out: Buffer) -> Buffer:
        return self._add("embed", (), out, (weight,))

    def rms_norm(self, x: Buffer, weight: str, eps: float, out: Buffer) -> Buffer:
        return self._add("rms_norm", (x,), out, (weight,), eps=eps)

    def layer_norm(self, x: Buffer, weight: str, bias: str | None, eps: float, out: Buffer) -> Buffer:
        return self._add("layer_norm", (x,), out, (weight,) if bias is None else (weight, bias), eps=eps)

    def rms_norm_slices(self, x: Buffer, weight: str, eps: float, first_column: int, num_slices: int) -> Buffer:
        return self._add("rms_norm_slices", (x,), x, (weight,), eps=eps, first_column=first_column,
                         num_slices=num_slices)

    def linear(self, x: Buffer, weight: str, out: Buffer, out_column: int = 0, bias: str | None = None) -> Buffer:
        return self._add("linear", (x,), out, (weight,) if bias is None else (weight, bias), out_column=out_column)

    def rope_write_kv(self, qkv: Buffer, rope: str | None, place: KVPlace, out: Buffer) -> Buffer:
        return self._add("rope_write_kv", (qkv,), out, () if rope is None else (rope,), **place.attrs())

    def paged_attention(self, q: Buffer, place: KVPlace, scale: float, out: Buffer,
                        softcap: float | None = None) -> Buffer:
        extras = {"softcap": softcap, "window": place.window}
        given = {name: value for name, value in extras.items() if value is not None}
        return self._add("paged_attention", (q,), out, (), scale=scale, **place.attrs(), **given)

    def silu_mul(self, gate_up: Buffer, out: Buffer) -> Buffer:
        return self._add("silu_mul", (gate_up,), out)

    def gelu_tanh_mul(self, gate_up: Buffer, out: Buffer) -> Buffer:
        return self._add("gelu_tanh_mul", (gate_up,), out)

    def add(self, x: Buffer, y: Buffer, scale: float = 1.0) -> Buffer:
        return self._add("add", (x, y), x, (), **({} if scale == 1.0 else {"scale": scale}))

    def add_gated(self, x: Buffer, y: Buffer, gate: Buffer) -> Buffer:
        return self._add("add_gated", (x, y, gate), x)

    def scale(self, x: Buffer, factor: float) -> Buffer:
        return self._add("scale", (x,), x, (), factor=factor)

    def softcap(self, x: Buffer, cap: float) -> Buffer:
        return self._add("softcap", (x,), x, (), cap=cap)

    def route(self, logits: Buffer, top_k: int, renormalise: bool, out: Buffer) -> Buffer:
        return self._add("route", (logits,), out, (), top_k=top_k, renormalise=int(renormalise))

    def gather_routed(self, x: Buffer, routes: Buffer, out: Buffer) -> Buffer:
        return self._add("gather_routed", (x, routes), out)

    def expert_linear(self, x: Buffer, routes: Buffer, weights: tuple[str, ...], out: Buffer,
                      out_column: int = 0) -> Buffer:
        """weights: one for each expert, by id."""
        return self._add("expert_linear", (x, routes), out, weights, out_column=out_column)

    def combine_routed(self, x: Buffer, routes: Buffer, out: Buffer) -> Buffer:
        return self._add("combine_routed", (x, routes), out)

    def select_wanted(self, x: Buffer, out: Buffer) -> Buffer:
        return self._add("select_wanted", (x,), out)

    def sample(self, logits: Buffer) -> None:
        self._nodes.append(Node("sample", (logits.buffer_id,), None))

    def finish(self) -> Program:
        return Program(tuple(self._buffers), tuple(self._nodes), dict(self._weights), *self._shape)

    def _add(self, verb: str, inputs: tuple[Buffer, ...], out: Buffer, weights: tuple[str, ...] = (),
             **attrs: float | int) -> Buffer:
        ids = tuple(buffer.buffer_id for buffer in inputs)
        self._nodes.append(Node(verb, ids, out.buffer_id, weights, attrs))
        return out
