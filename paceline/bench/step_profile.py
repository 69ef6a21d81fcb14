"""Where the time of whole steps goes: the program's own timers, over decode steps and a prefill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import kernel_parts as parts
from .kernel_parts import StepShape
from .kernels import BenchModel, TimedRunner, num_groups

DECODE_ROWS = (1, 8, 32)
DECODE_KEYS = 200
PREFILL_TOKENS = 512
WARM_UP_STEPS = 3
DECODE_STEPS, PREFILL_STEPS = 40, 5
DEFINITION = (
    "calls and ms of one step, each operation from its beginning to the next one's, on all threads: waiting for each "
    "other counts. Nodes that work row by row run as one operation, named after all of them; prepare rounds a linear's "
    "input to the form of its weights. Arrays of the step, its copies and Python are not in it")


def shapes(max_model_len: int) -> dict[str, tuple[StepShape, int]]:
    """What is profiled, by name: the step, and how often it runs. A short model sees shorter contexts."""
    keys, tokens = min(DECODE_KEYS, max_model_len), min(PREFILL_TOKENS, max_model_len)
    named = {f"decode, {rows} rows, {keys} keys": (StepShape(rows, 1, keys), DECODE_STEPS) for rows in DECODE_ROWS}
    return named | {f"prefill, {tokens} tokens": (StepShape(1, tokens, tokens), PREFILL_STEPS)}


def profile(model: BenchModel) -> dict[str, list[dict[str, Any]]]:
    """By step: its operations, {operation, calls, ms, share of the step's ms}, in the order of the program."""
    steps, groups = shapes(model.max_model_len), num_groups(model.program)
    num_blocks = max(shape.num_blocks(model.kv.block_size, groups) for shape, _ in steps.values())
    runner = model.bind(model.program, replace(model.kv, num_blocks=num_blocks))
    try:
        runner.step(parts.copies_batch(num_blocks - 1, groups))
        return {name: _operations(runner, model, *step) for name, step in steps.items()}
    finally:
        runner.close()


def _operations(runner: TimedRunner, model: BenchModel, shape: StepShape, num_steps: int) -> list[dict[str, Any]]:
    batch = parts.step_batch(shape, model.kv.block_size, num_groups(model.program), model.program.vocab_size)
    for _ in range(WARM_UP_STEPS):
        runner.step(batch)
    runner.profile(True)
    for _ in range(num_steps):
        runner.step(batch)
    report = [line for line in runner.profile_report() if line[1] > 0]
    runner.profile(False)
    in_all = sum(seconds for _, _, seconds in report)
    return [{"operation": name, "calls": calls / num_steps, "ms": 1e3 * seconds / num_steps, "share": seconds / in_all}
            for name, calls, seconds in report]


def table(steps: dict[str, list[dict[str, Any]]]) -> str:
    """One section a step, the costliest operation first."""
    width = max(len(row["operation"]) for rows in steps.values() for row in rows)
    lines = []
    for name, rows in steps.items():
        lines.append(f"{name:<{width + 2}}  calls        ms  share")
        lines += [f"  {row['operation']:<{width}}  {row['calls']:>5.3g}  {row['ms']:>8.3f}  {100 * row['share']:>4.1f}%"
                  for row in sorted(rows, key=lambda row: -row["ms"])]
        lines += [f"  {'in all':<{width}}  {'':>5}  {sum(row['ms'] for row in rows):>8.3f}", ""]
    return "\n".join([*lines, DEFINITION])
