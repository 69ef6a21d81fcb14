"""Experts in the step runner: against float64, however the tokens spread over them, and each token by itself."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.ops.program import Program, ProgramRecorder
from tests.kernels.test_linear import bell, same_bits
from tests.kernels.test_runner import bind, ints, step_of

FORMS = ("f32", "bf16", "int8", "int4")
HIDDEN, INNER, EXPERTS, TOP_K, VOCAB = 96, 64, 7, 3, 96

# Root mean square of the error over that of the outputs: activations are rounded twice, to bf16 or to 8 bits.
STATED_ERROR = {"f32": 5e-6, "bf16": 0.006, "int8": 0.015, "int4": 0.015}

# Where the router sends tokens: column 0 of every token is 1, so that an expert's first weight is its bias.
SPREADS = {
    "anywhere": np.zeros(EXPERTS), "all to the same": np.array([0, 9, 0, 0, 9, 9, 0]),
    "three get none": np.array([-9, 0, 0, -9, 0, 0, -9]),
}


class Layer:
    """One layer of experts between an embedding and the logits, which are its output."""

    def __init__(self, kernels: ModuleType, form: str, spread: str) -> None:
        self.kernels, self.form = kernels, form
        self.table = bell(1, VOCAB, HIDDEN)
        self.table[:, 0] = 1
        self.router = bell(2, EXPERTS, HIDDEN) / 10
        self.router[:, 0] += SPREADS[spread]
        self.gate_up = [self.packed(bell(10 + e, 2 * INNER, HIDDEN) / HIDDEN**0.5, form) for e in range(EXPERTS)]
        self.down = [self.packed(bell(40 + e, HIDDEN, INNER) / INNER**0.5, form) for e in range(EXPERTS)]
        self.program = self.record()

    def packed(self, values: NDArray[np.float32], form: str) -> Any:
        return self.kernels.pack(form, values.shape[1], [("F32", values.view(np.uint8), None)])

    def record(self) -> Program:
        recorder = ProgramRecorder(4, 2, 16, VOCAB)
        x, y = recorder.buffer("tokens", HIDDEN), recorder.buffer("tokens", HIDDEN)
        logits, routes = recorder.buffer("tokens", EXPERTS), recorder.buffer("tokens", 2 * TOP_K)
        rows, gate_up = recorder.buffer("routed", HIDDEN), recorder.buffer("routed", 2 * INNER)
        inner, outputs = recorder.buffer("routed", INNER), recorder.buffer("routed", HIDDEN)
        names = [tuple(recorder.weight(f"{name}{e}", weight) for e, weight in enumerate(weights))
                 for name, weights in (("gate_up", self.gate_up), ("down", self.down))]
        recorder.embed(recorder.weight("embed", self.packed(self.table, "f32")), x)
        recorder.linear(x, recorder.weight("router", self.packed(self.router, "f32")), logits)
        recorder.route(logits, TOP_K, True, routes)
        recorder.gather_routed(x, routes, rows)
        recorder.expert_linear(rows, routes, names[0], gate_up)
        recorder.silu_mul(gate_up, inner)
        recorder.expert_linear(inner, routes, names[1], outputs)
        recorder.combine_routed(outputs, routes, y)
        recorder.sample(recorder.select_wanted(y, recorder.buffer("wanted", HIDDEN)))
        return recorder.finish()

    def run(self, path: str, tokens: NDArray[np.int32], num_threads: int = 1) -> NDArray[np.float32]:
        places = np.arange(len(tokens), dtype=np.int32)
        runner = bind(self.kernels, path, self.program, num_threads)
        return step_of(runner, token_ids=tokens, positions=places, row_starts=ints(0, len(tokens)), wanted=places,
                       block_tables=np.arange(-(-len(tokens) // 16), dtype=np.int32)[None, None], wants_logits=True)[2]

    def exact(self, tokens: NDArray[np.int32]) -> tuple[NDArray[np.float64], set[int]]:
        """In float64, with the packed weights; and the experts that were asked."""
        gate_up, down = ([self.kernels.unpack(w).astype(np.float64) for w in weights]
                         for weights in (self.gate_up, self.down))
        x = self.table[tokens].astype(np.float64)
        out, used = np.zeros_like(x), set()
        for t, logits in enumerate(x @ self.router.T.astype(np.float64)):
            chosen = np.argsort(-logits)[:TOP_K]
            shares = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
            used |= set(chosen.tolist())
            for expert, share in zip(chosen, shares, strict=True):
                gate, up = np.split(gate_up[expert] @ x[t], 2)
                out[t] += share * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        return out, used


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spread, num_used", [("anywhere", 7), ("all to the same", 3), ("three get none", 4)])
def test_three_hundred_tokens_are_those_of_float64_and_each_is_as_alone(
        kernels: ModuleType, path: str, form: str, spread: str, num_used: int) -> None:
    layer = Layer(kernels, form, spread)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 300).astype(np.int32)
    exact, used = layer.exact(tokens)
    assert len(used) == num_used
    got = layer.run(path, tokens)
    assert (got - exact).std() < STATED_ERROR[form] * exact.std()
    for num_threads in (2, 3, 5):
        assert same_bits(layer.run(path, tokens, num_threads), got), num_threads
    for t in range(0, 300, 60):
        assert same_bits(layer.run(path, tokens[t : t + 1], 1 + t % 3), got[t : t + 1]), t
    for part in (slice(0, 49), slice(48, 200), slice(200, 216)):
        assert same_bits(layer.run(path, tokens[part], 2), got[part]), part


@pytest.mark.parametrize("form", FORMS)
def test_a_poisoned_token_shows_and_stays_alone(kernels: ModuleType, path: str, form: str) -> None:
    layer = Layer(kernels, form, "anywhere")
    tokens = np.arange(20, dtype=np.int32)
    clean = layer.run(path, tokens, 2)
    layer.table[7, 40] = 3e38    # its products overflow; a NaN would not be packed
    layer.program = layer.record()
    got = layer.run(path, tokens, 2)
    assert not np.isfinite(got[7]).any()
    others = np.arange(20) != 7
    assert same_bits(got[others], clean[others])


def test_an_empty_step_after_a_full_one_is_nothing(kernels: ModuleType, path: str) -> None:
    layer = Layer(kernels, "int8", "anywhere")
    runner = bind(kernels, path, layer.program, 2)
    full, nothing = np.arange(30, dtype=np.int32), {"token_ids": ints(), "positions": ints(), "row_starts": ints(0),
                                                    "block_tables": np.zeros((1, 0, 4), np.int32), "wanted": ints()}
    step_of(runner, token_ids=full, positions=full, row_starts=ints(0, 30), block_tables=ints(0, 1)[None, None])
    assert len(step_of(runner, **nothing)[0]) == 0


@pytest.mark.parametrize("num_experts, top_k", [(1, 1), (4, 2), (16, 16), (17, 3), (60, 4), (128, 8)])
@pytest.mark.parametrize("renormalise", [False, True])
def test_route(kernels: ModuleType, path: str, num_experts: int, top_k: int, renormalise: bool) -> None:
    logits = bell(5, 40, num_experts) * 3
    logits[::5] = np.round(logits[::5])    # ties
    got = kernels.route(path, logits, top_k, renormalise)
    chosen = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :top_k], axis=1)
    assert np.array_equal(got[:, :top_k], chosen)
    shares = np.exp(logits.astype(np.float64))
    shares = np.take_along_axis(shares / shares.sum(axis=1, keepdims=True), chosen, axis=1)
    exact = shares / shares.sum(axis=1, keepdims=True) if renormalise else shares
    assert np.allclose(got[:, top_k:], exact, rtol=2e-6, atol=1e-30)
    rows = [kernels.route(path, logits[i : i + 1], top_k, renormalise) for i in range(40)]
    assert same_bits(got, np.concatenate(rows))


def test_logits_that_are_not_finite_still_name_experts(kernels: ModuleType, path: str) -> None:
    logits = bell(6, 6, 20)
    logits[0], logits[1, 0], logits[2, 19], logits[3, 5], logits[4] = np.nan, np.nan, np.nan, np.inf, -np.inf
    got = kernels.route(path, logits, 4, True)
    for row in got:
        assert len(set(row[:4])) == 4 and set(row[:4]) <= set(range(20))
    assert np.isnan(got[:5, 4:]).all() and np.isfinite(got[5]).all()


@pytest.mark.parametrize("width", [1, 16, 37])
def test_add_gated(kernels: ModuleType, path: str, width: int) -> None:
    x, y, gate = bell(7, 5, width), bell(8, 5, width), np.array([0, 500, -500, 1, -2], np.float32)
    got = kernels.add_gated(path, x, y, gate)
    assert np.allclose(got, x + y / (1 + np.exp(-gate[:, None].astype(np.float64))), rtol=1e-6, atol=1e-6)
    rows = [kernels.add_gated(path, x[i : i + 1], y[i : i + 1], gate[i : i + 1]) for i in range(5)]
    assert same_bits(got, np.concatenate(rows))


ROUTE = ("route", [1], 2, [], {"top_k": 2, "renormalise": 1})
GATHER = ("gather_routed", [0, 2], 3, [], {})
BAD_PROGRAMS: list[tuple[list[tuple[Any, ...]], str]] = [
    ([("route", [1], 2, [], {"top_k": 4, "renormalise": 1})], r"node 0 \(route\): top_k must be a whole number from 1"),
    ([("route", [1], 0, [], {"top_k": 2, "renormalise": 1})], r"node 0 \(route\): buffer 0 is 32 wide, needs 4"),
    ([GATHER], r"node 0 \(gather_routed\): buffer 2 does not hold the last routes"),
    ([ROUTE, ("scale", [2], 2, [], {"factor": 2.0}), GATHER], r"node 2 \(gather_routed\): buffer 2 does not hold"),
    ([ROUTE, ("gather_routed", [0, 2], 0, [], {})], r"node 1 \(gather_routed\): buffer 0 must have the rows of routed"),
    ([ROUTE, ("expert_linear", [3, 2], 4, ["a", "b"], {})], r"node 1 \(expert_linear\): needs a weight for each of"),
    ([ROUTE, ("expert_linear", [3, 2], 4, ["a", "b", "c"], {})], r"weight c differs in form or shape from a"),
    ([ROUTE, ("expert_linear", [3, 2], 4, ["a", "b", "a"], {"out_column": 1})], r"columns 1 to 33 do not fit buffer 4"),
    ([ROUTE, ("linear", [3], 0, ["a"], {})], r"node 1 \(linear\): buffer 0 must have the rows of routed"),
    ([ROUTE, ("combine_routed", [0, 2], 3, [], {})], r"\(combine_routed\): buffer 0 must have the rows of routed"),
    ([ROUTE, ("route", [1], 5, [], {"top_k": 1, "renormalise": 1})], r"node 1 \(route\): top_k must be the same"),
    ([("add_gated", [0, 0, 1], 0, [], {})], r"node 0 \(add_gated\): buffer 1 is 3 wide, needs 1"),
]


@pytest.mark.parametrize("nodes, message", BAD_PROGRAMS, ids=[message for _, message in BAD_PROGRAMS])
def test_a_bad_program_is_refused_by_node(kernels: ModuleType, nodes: list[tuple[Any, ...]], message: str) -> None:
    def packed(form: str) -> Any:
        return kernels.pack(form, 32, [("F32", np.zeros((32, 32), np.float32).view(np.uint8), None)])
    weights = {"a": packed("f32"), "b": packed("f32"), "c": packed("int8")}
    buffers = [(0, "tokens", 32), (1, "tokens", 3), (2, "tokens", 4), (3, "routed", 32), (4, "routed", 32),
               (5, "tokens", 2)]
    kv = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 16, "block_size": 16, "num_blocks": 2, "dtype": "bf16"}
    with pytest.raises(ValueError, match=message):
        kernels.Runner(kernels.paths()[0], 1, buffers, nodes, weights, 2, 1, 16, 96, kv)
