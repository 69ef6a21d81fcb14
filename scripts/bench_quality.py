"""What each form of weights and cache costs on real text, as a table for docs/benchmarks.md.

    python scripts/bench_quality.py [MODEL] [--isa avx2]

Every row is `paceline info MODEL --quality --dtype ... --kv-dtype ... --json`: the model in that form against its own
values, dequantised, in f32 with an f32 cache, on the text that comes with the package. The first row is the reference
against itself. No figure here is a time.
"""

from __future__ import annotations

import argparse

from paceline.config import KV_DTYPES, WEIGHT_FORMS, ModelConfig
from paceline.info import describe_quality


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--isa", default="auto")
    arguments = parser.parse_args()
    print("| weights | KV | perplexity | change % (standard error) | greedy agreement | mean KL, nats |\n"
          "|---|---|---|---|---|---|", flush=True)
    for kv_dtype in KV_DTYPES:
        for dtype in (*WEIGHT_FORMS, "auto"):
            config = ModelConfig(model=arguments.model, dtype=dtype, kv_dtype=kv_dtype, isa=arguments.isa)
            report(dtype, kv_dtype, describe_quality(config)["quality"])


def report(dtype: str, kv_dtype: str, facts: dict[str, float]) -> None:
    print(f"| {dtype} | {kv_dtype} | {facts['perplexity']:.4f} | {facts['perplexity_change_percent']:+.3f} "
          f"({facts['perplexity_change_standard_error']:.3f}) | {facts['greedy_agreement']:.4f} | "
          f"{facts['mean_kl_nats']:.2e} |", flush=True)


if __name__ == "__main__":
    main()
