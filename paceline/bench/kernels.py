"""What each kind of operation of a model's step costs, and how far that is from what the machine can do.

Before every pass all threads read memory larger than the caches: so no weight is found in a cache, as in a step of a
model that does not fit one, and each figure has a bandwidth measured beside it. Times are the step runner's own timers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ..ops.interface import ForwardBatch, KVSpec, StepOutput
from ..ops.machine import available_memory_bytes
from ..ops.program import Node, Program
from . import kernel_parts as parts
from .kernel_parts import StepShape, Work

ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
CONTEXTS = (256, 1024, 4096)
NUM_PASSES = 7
MAX_DECODE_ROWS = 64              # more tokens in a step are a prompt's
MIN_PREFILL_ROWS = 16
MAX_KV_BYTES = 2 << 30            # as DEFINITION says; half of what is available where that is less
FORMS = ("f32", "bf16", "int8", "int4")
NUM_PEAK_RUNS = 5
DEFINITION = (
    "ms: of all layers together, median of the passes, from an operation's beginning to the next one's (least: the "
    "shortest pass). GB/s: weights, or keys and values, once, over that time; of the other operations, rows in and "
    "out, which lie in a cache. GOP/s: multiplications and additions. share: the longer of the time to read those "
    "bytes at the greatest bandwidth read between these passes and the time to multiply at the peak of the form, "
    "over ms; none where neither is the limit. Steps whose keys and values take more than 2 GiB are left out. "
    "Linears without the rounding of their inputs (paceline info --profile has it), and without the last layer's "
    "past its attention, which work on wanted positions only")


class Calibration(Protocol):
    """The machine's limits: paceline._kernels.Calibration."""

    def read_gb_per_second(self) -> float: ...
    def gops(self, form: str) -> float: ...
    def barrier_nanoseconds(self) -> float: ...


class TimedRunner(Protocol):
    """A step runner with timers: ops.cpu.CpuRunner."""

    def step(self, batch: ForwardBatch) -> StepOutput: ...
    def profile(self, enable: bool) -> None: ...
    def profile_report(self) -> list[tuple[str, int, float]]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table. rows: tokens it worked on; keys: of the context, where that matters."""

    operation: str
    rows: int
    keys: int | None
    ms: float
    ms_least: float
    gb_per_second: float
    gops: float | None
    share: float | None
    read_gb_per_second: float


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A program, the geometry of its cache (num_blocks is not read) and how to bind them."""

    program: Program
    kv: KVSpec
    max_model_len: int
    bind: Callable[[Program, KVSpec], TimedRunner]


class Machine:
    """Its limits; remembers every bandwidth it read."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self.peak_gops = {form: max(calibration.gops(form) for _ in range(NUM_PEAK_RUNS)) for form in FORMS}
        self.barrier_ns = min(calibration.barrier_nanoseconds() for _ in range(NUM_PEAK_RUNS))
        self.reads: list[float] = []

    def read(self) -> float:
        """GB/s of a pass over memory, which also empties the caches of everything else."""
        self.reads.append(self._calibration.read_gb_per_second())
        return self.reads[-1]

    def facts(self) -> dict[str, Any]:
        return {"read_gb_per_second": statistics.median(self.reads), "read_gb_per_second_least": min(self.reads),
                "read_gb_per_second_greatest": max(self.reads), "barrier_ns": self.barrier_ns,
                "peak_gops": self.peak_gops}


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds by the runner's names for operations, and the bandwidth read just before."""

    seconds: dict[str, float]
    read_gb_per_second: float


class KernelBench:
    """Times the parts of one model's program."""

    def __init__(self, model: BenchModel, machine: Machine, num_passes: int = NUM_PASSES) -> None:
        self._model, self._machine, self._num_passes = model, machine, num_passes

    def linears(self, num_rows: int) -> Iterator[Cell]:
        """One cell a shape and form, without those that work on wanted positions only."""
        program = self._model.program
        part = parts.part_of(program, lambda node: node.verb == "linear" and not parts.is_of_wanted(program, node))
        if part is not None:
            passes = self._passes(part, self._shape(num_rows))
            for name, work in parts.linear_work(part, num_rows).items():
                yield self._cell(name, num_rows, name, work, passes)

    def tail(self, num_rows: int) -> Iterator[Cell]:
        """The head, and sampling from its logits; no step wants those of more rows than it decodes."""
        program = self._model.program
        part = parts.part_of(program, lambda node: node.verb == "embed" or parts.is_of_tail(program, node))
        if part is None or num_rows > MAX_DECODE_ROWS:
            return
        shape = self._shape(num_rows)
        greedy = self._passes(part, shape)
        for name, work in parts.linear_work(part, num_rows).items():
            yield self._cell("head " + name.removeprefix("linear "), num_rows, name, work, greedy)
        logits = Work(4 * num_rows * program.vocab_size, reads_memory=False)
        yield self._cell("sample, greedy", num_rows, "sample", logits, greedy)
        drawn = self._passes(part, replace(shape, temperature=1.0))
        yield self._cell("sample, top_p 0.9", num_rows, "sample", logits, drawn)

    def rows(self, num_rows: int) -> Iterator[Cell]:
        """Each verb that works row by row, and a layer's experts where there are any."""
        program = self._model.program
        for verb in parts.ROW_VERBS:
            part = parts.part_of(program, partial(_is_row_verb, program, verb))
            if part is not None:
                passes = self._passes(part, self._shape(num_rows))
                yield self._cell(verb, num_rows, None, parts.row_work(part, self._model.kv, num_rows), passes)
        part = parts.part_of(program, partial(parts.is_of_experts, program))
        if part is not None:
            passes = self._passes(part, self._shape(num_rows))
            yield self._cell("experts", num_rows, None, parts.expert_work(part, num_rows), passes)

    def attention(self, num_rows: int, num_keys: int) -> Iterator[Cell]:
        """num_rows requests that decode, and a prompt's last num_rows tokens, where there are such steps."""
        part = parts.part_of(self._model.program, lambda node: node.verb == "paged_attention")
        shapes = {"decode": StepShape(num_rows, 1, num_keys), "prefill": StepShape(1, num_rows, num_keys)}
        if num_rows > MAX_DECODE_ROWS:
            del shapes["decode"]
        if not MIN_PREFILL_ROWS <= num_rows <= num_keys:
            del shapes["prefill"]
        for name, shape in shapes.items():
            if part is not None and num_keys <= self._model.max_model_len and self._fits(part, shape):
                kv = self._model.kv
                work = parts.attention_work(part, kv, shape.num_rows, shape.tokens_per_row, num_keys)
                cell = self._cell(f"paged_attention {name} {kv.dtype}", num_rows, None, work, self._passes(part, shape))
                yield replace(cell, keys=num_keys)

    def copies(self, num_rows: int) -> Iterator[Cell]:
        """As many blocks as rows, copied before the step's first node: by the calling thread, timed around the step."""
        part = parts.part_of(self._model.program, lambda node: node.verb == "paged_attention")
        kv = self._model.kv
        if part is None or (1 + num_rows) * kv.bytes_per_block > MAX_KV_BYTES:
            return
        with self._bound(part, 1 + num_rows) as runner:
            batch = parts.copies_batch(num_rows, num_groups(part))
            runner.step(batch)
            passes = []
            for _ in range(self._num_passes):
                read = self._machine.read()
                passes.append(Pass({"copy_blocks": seconds_of(lambda: runner.step(batch))}, read))
        yield self._cell("copy_blocks", num_rows, None, Work(2 * num_rows * kv.bytes_per_block), passes)

    def _shape(self, num_rows: int) -> StepShape:
        """Rows that decode behind short contexts, or one prompt."""
        if MAX_DECODE_ROWS < num_rows <= self._model.max_model_len:
            return StepShape(1, num_rows, num_rows)
        return StepShape(num_rows, 1, min(CONTEXTS[0], self._model.max_model_len))

    def _fits(self, part: Program, shape: StepShape) -> bool:
        kv, available = self._model.kv, available_memory_bytes()
        most = MAX_KV_BYTES if available is None else min(MAX_KV_BYTES, available // 2)
        return shape.num_blocks(kv.block_size, num_groups(part)) * kv.bytes_per_block <= most

    def _passes(self, part: Program, shape: StepShape) -> list[Pass]:
        groups, kv = num_groups(part), self._model.kv
        num_blocks = shape.num_blocks(kv.block_size, groups)
        batch = parts.step_batch(shape, kv.block_size, groups, part.vocab_size)
        with self._bound(part, num_blocks) as runner:
            if any("layer" in node.attrs for node in part.nodes):    # memory never written would all be one zero page
                runner.step(parts.copies_batch(num_blocks - 1, groups))
            runner.step(batch)
            return [self._pass(runner, batch) for _ in range(self._num_passes)]

    def _pass(self, runner: TimedRunner, batch: ForwardBatch) -> Pass:
        read = self._machine.read()
        runner.profile(True)
        runner.step(batch)
        return Pass({name: seconds for name, _, seconds in runner.profile_report()}, read)

    @contextmanager
    def _bound(self, part: Program, num_blocks: int) -> Iterator[TimedRunner]:
        runner = self._model.bind(part, replace(self._model.kv, num_blocks=num_blocks))
        try:
            yield runner
        finally:
            runner.close()

    def _cell(self, operation: str, num_rows: int, name: str | None, work: Work, passes: list[Pass]) -> Cell:
        """name: the operation whose seconds count; None: all of the part's."""
        times = [sum(one.seconds.values()) if name is None else one.seconds[name] for one in passes]
        seconds, read = statistics.median(times), max(one.read_gb_per_second for one in passes)
        share = None
        if work.reads_memory:
            floor = work.num_bytes / (1e9 * read)
            if work.form is not None:
                floor = max(floor, work.num_operations / (1e9 * self._machine.peak_gops[work.form]))
            share = floor / seconds
        gops = work.num_operations / seconds / 1e9 if work.num_operations else None
        return Cell(operation, num_rows, None, 1e3 * seconds, 1e3 * min(times), work.num_bytes / seconds / 1e9, gops,
                    share, read)


def _is_row_verb(program: Program, verb: str, node: Node) -> bool:
    return node.verb == verb and not parts.is_of_wanted(program, node) and not parts.is_of_experts(program, node)


def seconds_of(call: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    call()
    return time.perf_counter() - started_at


def num_groups(program: Program) -> int:
    return 1 + max((int(node.attrs.get("kv_group", 0)) for node in program.nodes), default=0)


def table(cells: list[Cell]) -> str:
    width = max(len(cell.operation) for cell in cells)
    lines = [f"{'operation':<{width}}  rows   keys        ms     least    GB/s   GOP/s  share"]
    for cell in cells:
        keys = f"{cell.keys:,}" if cell.keys is not None else ""
        gops = f"{cell.gops:.0f}" if cell.gops is not None else ""
        share = f"{100 * cell.share:.0f}%" if cell.share is not None else ""
        lines.append(f"{cell.operation:<{width}}  {cell.rows:>4}  {keys:>5}  {cell.ms:>8.3f}  {cell.ms_least:>8.3f}  "
                     f"{cell.gb_per_second:>6.1f}  {gops:>6}  {share:>5}")
    return "\n".join(lines)


def calibration_line(facts: dict[str, Any]) -> str:
    peaks = ", ".join(f"{form} {gops:.0f}" for form, gops in facts["peak_gops"].items())
    return (f"memory read {facts['read_gb_per_second']:.1f} GB/s ({facts['read_gb_per_second_least']:.1f} to "
            f"{facts['read_gb_per_second_greatest']:.1f}), barrier {facts['barrier_ns']:.0f} ns, peak GOP/s {peaks}")
