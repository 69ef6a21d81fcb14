"""`paceline bench kernels` and `info --profile`: every operation is timed in steps that are what they say, and held
against what it has to read and multiply."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import build, info
from paceline.bench import kernel_parts, kernels, step_profile
from paceline.bench.kernel_parts import StepShape, Work, step_batch
from paceline.bench.kernels import BenchModel, Cell, KernelBench, Machine
from paceline.cli import main
from paceline.config import ModelConfig
from paceline.model.decoder import record_decoder
from paceline.model.spec import ModelSpec
from paceline.ops.cpu import CpuBackend, load_kernels
from tests.model import tiny
from tests.runner.helpers import kv_of, random_weights, tiny_spec

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="the extension is not built")
PATHS = load_kernels().paths() if load_kernels() else []
EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 64}
FIELDS = {"operation", "rows", "keys", "ms", "ms_least", "gb_per_second", "gops", "share", "read_gb_per_second"}


class Steady:
    """A machine whose limits are known."""

    def read_gb_per_second(self) -> float:
        return 20.0

    def gops(self, form: str) -> float:
        return {"f32": 100.0, "bf16": 200.0, "int8": 400.0, "int4": 800.0}[form]

    def barrier_nanoseconds(self) -> float:
        return 50.0


def bench_model(path: str = "auto", dtype: str = "int8", spec: ModelSpec | None = None) -> BenchModel:
    spec, backend = spec or tiny_spec(), CpuBackend(path, num_threads=2)
    program = record_decoder(spec, random_weights(spec), backend, dtype, spec.max_position)
    return BenchModel(program, kv_of(spec), spec.max_position, backend.bind)


def cells_of(model: BenchModel, num_rows: int, num_keys: int = 64) -> dict[str, Cell]:
    bench = KernelBench(model, Machine(Steady()), num_passes=2)
    cells = [*bench.linears(num_rows), *bench.tail(num_rows), *bench.rows(num_rows),
             *bench.attention(num_rows, num_keys), *bench.copies(num_rows)]
    assert len({cell.operation for cell in cells}) == len(cells)
    return {cell.operation: cell for cell in cells}


def test_rows_of_a_step_share_no_block_and_end_at_their_last_key() -> None:
    shape = StepShape(num_rows=3, tokens_per_row=4, num_keys=40)
    batch = step_batch(shape, block_size=16, num_groups=2, vocab_size=50)
    assert batch.positions.tolist() == [36, 37, 38, 39] * 3 and batch.row_starts.tolist() == [0, 4, 8, 12]
    assert batch.wanted.tolist() == [3, 7, 11] and batch.block_tables.shape == (2, 3, 3)
    used = batch.block_tables.ravel().tolist()
    assert len(set(used)) == len(used) and max(used) + 1 == shape.num_blocks(16, 2)
    assert kernel_parts.ZERO_BLOCK not in used


@needs_kernels
def test_attention_reads_the_keys_that_are_seen_once_and_multiplies_with_each_twice() -> None:
    spec = tiny_spec(windows=(None, 16))
    model = bench_model(spec=spec)
    part = kernel_parts.part_of(model.program, lambda node: node.verb == "paged_attention")
    assert part is not None and kernels.num_groups(part) == 2
    per_key = 2 * 2 * 16 * 2    # keys and values, heads, head_dim, bytes
    decode = kernel_parts.attention_work(part, model.kv, num_rows=3, tokens_per_row=1, num_keys=100)
    assert decode == Work(3 * per_key * (100 + 16), 3 * 4 * 4 * 16 * (100 + 16), "bf16")
    prompt = kernel_parts.attention_work(part, model.kv, num_rows=1, tokens_per_row=4, num_keys=4)
    assert prompt == Work(2 * per_key * 4, 2 * 4 * 4 * 16 * (1 + 2 + 3 + 4), "bf16")


@needs_kernels
def test_the_share_is_that_of_the_nearer_limit() -> None:
    bench = KernelBench(bench_model(), Machine(Steady()))
    one = [kernels.Pass({"x": 0.002, "y": 9.0}, 20.0)]
    read = bench._cell("x", 1, "x", Work(20_000_000, 1000, "int8"), one)         # 1 ms to read
    multiplied = bench._cell("x", 1, "x", Work(100, 400_000_000, "int8"), one)   # 1 ms to multiply
    assert (read.share, multiplied.share) == (pytest.approx(0.5), pytest.approx(0.5))
    assert (read.gb_per_second, multiplied.gops) == (pytest.approx(10.0), pytest.approx(200.0))
    assert bench._cell("x", 1, None, Work(100, reads_memory=False), one).share is None


@needs_kernels
@pytest.mark.parametrize("dtype", ("f32", "bf16", "int8", "int4"))
@pytest.mark.parametrize("path", PATHS)
def test_every_operation_of_a_model_is_timed_on_every_path_and_in_every_form(path: str, dtype: str) -> None:
    cells = cells_of(bench_model(path, dtype), num_rows=16)
    assert set(cells) == {
        f"linear 128x64 {dtype}", f"linear 64x64 {dtype}", f"linear 192x64 {dtype}", f"linear 64x96 {dtype}",
        f"head 160x64 {dtype}", "sample, greedy", "sample, top_p 0.9", "embed", "rms_norm", "rope_write_kv", "silu_mul",
        "add", "paged_attention decode bf16", "paged_attention prefill bf16", "copy_blocks"}
    assert all(0 < cell.ms_least <= cell.ms and cell.gb_per_second > 0 for cell in cells.values())
    limited = {name for name in cells if name.startswith(("linear", "head", "paged", "copy"))}
    assert all((cell.share is not None) == (cell.operation in limited) for cell in cells.values())


@needs_kernels
def test_experts_are_timed_together() -> None:
    cells = cells_of(bench_model(spec=tiny_spec(**EXPERTS)), num_rows=1)
    assert cells["experts"].gops is not None
    model = bench_model(spec=tiny_spec(**EXPERTS))
    part = kernel_parts.part_of(model.program, lambda node: kernel_parts.is_of_experts(model.program, node))
    assert part is not None
    one, many = (kernel_parts.expert_work(part, num_rows) for num_rows in (1, 100))
    assert many.num_bytes == 2 * one.num_bytes    # all four experts, where one token meets two
    assert many.num_operations == 100 * one.num_operations


@needs_kernels
def test_more_rows_than_decode_together_are_one_prompt_and_want_no_heads_of_all_of_them() -> None:
    cells = cells_of(bench_model(), num_rows=100, num_keys=128)
    assert "paged_attention prefill bf16" in cells and "paged_attention decode bf16" not in cells
    assert not any(name.startswith(("head", "sample")) for name in cells)
    beyond = cells_of(bench_model(), num_rows=300)    # more than the model's 256 positions
    assert beyond["linear 64x64 int8"].rows == 300 and not any("attention" in name for name in beyond)


@needs_kernels
def test_a_step_of_too_many_keys_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bench_model()
    monkeypatch.setattr(kernels, "MAX_KV_BYTES", 5 * model.kv.bytes_per_block)
    bench = KernelBench(model, Machine(Steady()), num_passes=1)
    assert [cell.keys for keys in (64, 65) for cell in bench.attention(1, keys)] == [64]
    assert list(bench.copies(5)) == []


@needs_kernels
@pytest.mark.parametrize("path", PATHS)
def test_a_path_measures_its_limits(path: str) -> None:
    machine = Machine(CpuBackend(path, num_threads=2).calibration())
    assert 0.1 < machine.read() < 10_000
    facts = machine.facts()
    assert set(facts["peak_gops"]) == {"f32", "bf16", "int8", "int4"} and min(facts["peak_gops"].values()) > 0
    assert facts["barrier_ns"] > 0 and facts["read_gb_per_second"] == machine.reads[0]


@needs_kernels
def test_a_calibration_refuses_what_it_cannot_do() -> None:
    extension = load_kernels()
    assert extension is not None
    for arguments, said in ((("mmx", 2), "mmx"), (("portable", 0), "num_threads"), (("portable", 1, 1000), "2\\^20")):
        with pytest.raises(ValueError, match=said):
            extension.Calibration(*arguments)


@pytest.fixture
def model_directory(tmp_path: Path) -> str:
    return str(tiny.write_hf(tmp_path, arrays=tiny.hf_arrays()))


@needs_kernels
def test_the_command_prints_one_object_or_a_table(model_directory: str, capsys: Any) -> None:
    argv = ["bench", "kernels", "--model", model_directory, "--rows", "1,16", "--contexts", "32", "--passes", "1",
            "--threads", "1", "--dtype", "f32,int8"]
    assert main([*argv, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["threads"] == 1 and len(facts["fingerprints"]) == 2 and "share" in facts["definition"]
    assert all(set(cell) == FIELDS for cell in facts["cells"])
    operations = [cell["operation"] for cell in facts["cells"]]
    assert operations.count("rms_norm") == 2 and sum(name.startswith("head") for name in operations) == 4
    assert main(argv) == 0
    page = capsys.readouterr().out
    assert "memory read" in page and page.count("paged_attention decode") == 2


@needs_kernels
def test_a_profile_names_all_operations_of_each_step(model_directory: str, capsys: Any) -> None:
    assert main(["info", model_directory, "--profile", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["profile"]
    assert len(steps) == len(step_profile.DECODE_ROWS) + 1
    for rows in steps.values():
        names = [row["operation"] for row in rows]
        assert any(name.startswith("linear") for name in names) and "paged_attention" in names
        assert sum(row["share"] for row in rows) == pytest.approx(1) and all(row["calls"] > 0 for row in rows)
    assert main(["info", model_directory, "--profile"]) == 0
    page = capsys.readouterr().out
    assert "decode, 8 rows" in page and "in all" in page and "model" in page


def test_the_numpy_reference_has_no_timers(model_directory: str, capsys: Any) -> None:
    for argv in (["info", model_directory, "--profile"], ["bench", "kernels", "--model", model_directory]):
        assert main([*argv, "--isa", "numpy"]) == 2
        assert "numpy" in capsys.readouterr().err


@needs_kernels
def test_timers_change_no_bit() -> None:
    model = bench_model()
    shape = StepShape(4, 1, 30)
    batch = step_batch(shape, 16, 1, model.program.vocab_size)
    runner = model.bind(model.program, replace(model.kv, num_blocks=shape.num_blocks(16, 1)))
    plain = runner.step(batch, wants_logits=True).logits    # type: ignore[call-arg]
    runner.profile(True)
    timed = runner.step(batch, wants_logits=True).logits    # type: ignore[call-arg]
    runner.close()
    assert plain is not None and timed is not None and np.array_equal(plain, timed)


def test_a_timed_step_is_not_begun_before_it_is_timed(tmp_path: Path) -> None:
    """The same step again and again is never the one that follows: begun ahead, it is given up beside the timed one."""
    model = tiny.write_gguf(tmp_path / "model.gguf")
    loaded = build.load_model(ModelConfig(model=str(model), num_threads=2, run_ahead="on"))
    assert loaded.backend.runs_ahead    # type: ignore[attr-defined]
    assert not info.bench_model(loaded).bind.__self__.runs_ahead    # type: ignore[attr-defined]
