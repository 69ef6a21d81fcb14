"""How long a step takes against the requests in it and the tokens behind them, and whether anything grows faster than
it must. For docs/benchmarks.md.

    python scripts/bench_step_scaling.py [MODEL] [--dtype int8] [--busy] [--svg docs/step_scaling.svg]

Times are of the kernels' call (arrays of the step included, the schedule not; `paceline bench core` has that): each
point is the least of its rounds, and the rounds go round over all points, so that a disturbance does not stay with one.
Decode is fitted as a + b rows + c keys, keys being those of all rows together, a prompt as a + b tokens + c tokens^2,
which is its attention's arithmetic; both by least squares of the relative error. A term of a degree more is then
added: the share of the longest step that it claims says whether something grows faster. Below some rows a step waits
for memory and not for multiplications, so that rows come cheaper there: the fit of decode starts at FIT_FROM_ROWS.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.bench import kernel_parts
from paceline.bench.kernel_parts import StepShape
from paceline.bench.kernels import BenchModel, num_groups
from paceline.build import load_model
from paceline.config import ModelConfig
from paceline.info import bench_model

ROWS = (1, 2, 4, 8, 16, 32, 48, 64)
CONTEXTS = (64, 256, 1024, 4096)
PROMPTS = (32, 64, 128, 256, 512, 1024, 2048)
MAX_KEYS = 65536          # of all rows together
FIT_FROM_ROWS = 8
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")


@dataclass(slots=True)
class Point:
    shape: StepShape
    ms: float = float("inf")

    @property
    def is_decode(self) -> bool:
        return self.shape.tokens_per_row == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--busy", action="store_true", help="for a machine that does other things: one compute thread, "
                        "and the time that the system let it run instead of the time that passed")
    arguments = parser.parse_args()
    loaded = load_model(ModelConfig(model=arguments.model, dtype=arguments.dtype, isa=arguments.isa,
                                    num_threads=1 if arguments.busy else None))
    points = [Point(StepShape(rows, 1, keys)) for keys in CONTEXTS for rows in ROWS if rows * keys <= MAX_KEYS]
    points += [Point(StepShape(1, tokens, tokens)) for tokens in PROMPTS]
    measure(bench_model(loaded), points, arguments.rounds, time.thread_time if arguments.busy else time.perf_counter)
    print(loaded.fingerprint + "\n")
    report(points)
    if arguments.svg is not None:
        arguments.svg.write_text(drawn(points), encoding="utf-8")


def measure(model: BenchModel, points: Sequence[Point], num_rounds: int, now: Callable[[], float]) -> None:
    groups, block_size = num_groups(model.program), model.kv.block_size
    num_blocks = max(point.shape.num_blocks(block_size, groups) for point in points)
    runner = model.bind(model.program, replace(model.kv, num_blocks=num_blocks))
    runner.step(kernel_parts.copies_batch(num_blocks - 1, groups))    # memory never written would be one zero page
    for _ in range(num_rounds):
        for point in points:
            batch = kernel_parts.step_batch(point.shape, block_size, groups, model.program.vocab_size)
            for _ in range(3 if point.is_decode else 1):
                started_at = now()
                runner.step(batch)
                point.ms = min(point.ms, 1e3 * (now() - started_at))
    runner.close()


def report(points: Sequence[Point]) -> None:
    decode = {(p.shape.num_rows, p.shape.num_keys): p.ms for p in points if p.is_decode}
    print("| decode, ms | " + " | ".join(f"{keys} keys each" for keys in CONTEXTS) + " |\n"
          + "|---" * (1 + len(CONTEXTS)) + "|")
    for rows in ROWS:
        print(f"| {rows} rows | " + " | ".join(f"{decode[rows, keys]:.2f}" if (rows, keys) in decode else "-"
                                                for keys in CONTEXTS) + " |")
    prompts = {p.shape.num_tokens: p.ms for p in points if not p.is_decode}
    print("\n| prompt tokens | " + " | ".join(map(str, prompts)) + " |\n" + "|---" * (1 + len(prompts)) + "|\n| ms | "
          + " | ".join(f"{ms:.1f}" for ms in prompts.values()) + " |\n")
    fitted = {at: ms for at, ms in decode.items() if at[0] >= FIT_FROM_ROWS}
    rows, keys = np.array([(rows, rows * keys) for rows, keys in fitted], float).T
    fit(f"decode, {FIT_FROM_ROWS} rows and more", {"": rows**0, "rows": rows, "keys": keys},
        {"rows^2": rows**2, "keys^2": keys**2}, np.array(list(fitted.values())))
    tokens = np.array(list(prompts), float)
    fit("prompt", {"": tokens**0, "tokens": tokens, "tokens^2": tokens**2}, {"tokens^3": tokens**3},
        np.array(list(prompts.values())))


def fit(name: str, terms: dict[str, NDArray[np.float64]], more: dict[str, NDArray[np.float64]],
        ms: NDArray[np.float64]) -> None:
    """Prints the coefficients, how far the worst point is off, and what each term of `more` would claim."""
    found, off = least_squares(list(terms.values()), ms)
    formula = " + ".join(f"{c:.4g} {term}".strip() for c, term in zip(found, terms, strict=True))
    print(f"{name}: ms = {formula}; worst point off by {100 * off:.1f}%")
    for term, values in more.items():
        with_it, off = least_squares([*terms.values(), values], ms)
        longest = int(ms.argmax())
        print(f"  with {term}: {with_it[-1]:.3g}, {100 * with_it[-1] * values[longest] / ms[longest]:+.1f}% of the "
              f"longest step; worst point off by {100 * off:.1f}%")


def least_squares(columns: Sequence[NDArray[np.float64]], ms: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Coefficients that make the relative errors' squares least, and the greatest relative error."""
    relative = np.stack(columns, axis=1) / ms[:, None]
    scale = np.abs(relative).max(axis=0)    # columns of one size, or the solver drops the small ones
    found = np.linalg.lstsq(relative / scale, np.ones(len(ms)), rcond=None)[0] / scale
    return found, float(np.abs(relative @ found - 1).max())


# --- the plot ---------------------------------------------------------------------------------------------------------


def drawn(points: Sequence[Point]) -> str:
    lines = {f"{keys} keys each": [(float(p.shape.num_rows), p.ms) for p in points
                                      if p.is_decode and p.shape.num_keys == keys] for keys in CONTEXTS}
    lines["prompt"] = [(float(p.shape.num_tokens), p.ms) for p in points if not p.is_decode]
    return svg(lines, "tokens in the step", "ms")


def svg(lines: dict[str, list[tuple[float, float]]], x_name: str, y_name: str) -> str:
    """Lines over two logarithmic axes."""
    xs, ys = zip(*(point for line in lines.values() for point in line), strict=True)
    left, top, width, height = 60, 20, 560, 340

    def at(x: float, y: float) -> tuple[float, float]:
        spans = (np.log(max(xs) / min(xs)), np.log(max(ys) / min(ys)))
        return left + width * np.log(x / min(xs)) / spans[0], top + height * (1 - np.log(y / min(ys)) / spans[1])

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 140} {top + height + 50}" '
           'font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="white"/>']
    for x in (2.0**n for n in range(12) if min(xs) <= 2**n <= max(xs)):
        out.append(f'<path d="M{at(x, 1)[0]:.1f} {top}v{height}" stroke="#ddd"/>'
                   f'<text x="{at(x, 1)[0]:.1f}" y="{top + height + 16}" text-anchor="middle">{x:.0f}</text>')
    for y in (float(f"{m}e{n}") for n in range(-1, 4) for m in (1, 2, 5)):
        if min(ys) <= y <= max(ys):
            out.append(f'<path d="M{left} {at(1, y)[1]:.1f}h{width}" stroke="#ddd"/>'
                       f'<text x="{left - 6}" y="{at(1, y)[1] + 4:.1f}" text-anchor="end">{y:g}</text>')
    for (name, line), colour in zip(lines.items(), COLOURS, strict=False):
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in line))
        end = at(*line[-1])
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
                   f'<text x="{end[0] + 6:.1f}" y="{end[1] + 4:.1f}" fill="{colour}">{name}</text>')
    out.append(f'<text x="{left + width / 2}" y="{top + height + 36}" text-anchor="middle">{x_name}</text>'
               f'<text x="14" y="{top + height / 2}">{y_name}</text></svg>')
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    main()
