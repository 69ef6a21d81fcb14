"""Engines without HTTP beside each other, for scripts/bench_peers.py: rounds of one load, each engine in a process of
its own around the loop of scripts/in_process.py, in turn on the same requests. Leaves a folder like a comparison's."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.bench.comparison import Cell, Comparison, Contestant, Load, write_cell, write_run
from paceline.bench.comparison_files import write_report
from paceline.bench.machine_facts import calibrate, calibration_facts, commit, machine_facts
from paceline.bench.metrics import CellFacts
from paceline.bench.records import Asked, RequestRecord
from paceline.bench.request_file import write_requests
from paceline.bench.workload import WorkloadSpec, requests_of

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_REQUESTS, WARM_UP_TOKENS = 8, 8    # at most, as `paceline compare` has it


class Engine:
    """One, ready. It sleeps but for `run`."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self.command = name, command
        self._log = log
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                         stderr=log.open("w"), env=os.environ | {"PYTHONPATH": str(ROOT)})
        while self._line() != "ready":    # a library may greet on its standard output
            pass

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, requests: Sequence[Asked], num_clients: int) -> list[RequestRecord]:
        lines = [[one.prompt_token_ids, one.num_output_tokens] for one in requests]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"num_clients": num_clients, "requests": lines}) + "\n")
        self._process.stdin.flush()
        answers = json.loads(self._line())
        return [_record(*one) for one in zip(requests, answers, strict=True)]

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self.name} ended: {self._log.read_text()[-2000:] or 'without a word'}")
        return line.strip()


def _record(asked: Asked, answer: tuple[float, list[float], list[int]]) -> RequestRecord:
    sent_at, times, counts = answer
    is_whole = sum(counts) == asked.num_output_tokens
    return RequestRecord(
        request_id=asked.request_id, cell="", status="ok" if is_whole else "cut",
        error=None if is_whole else f"{sum(counts)} of {asked.num_output_tokens} tokens", intended_at=sent_at,
        released_at=sent_at, sent_at=sent_at, token_times=tuple(times), token_counts=tuple(counts),
        ended_at=times[-1] if times else sent_at, asked_prompt_tokens=asked.num_prompt_tokens,
        asked_output_tokens=asked.num_output_tokens, prompt_tokens=asked.num_prompt_tokens, output_tokens=sum(counts),
        counted_by="token_ids")


class InProcess:
    """The rounds of one load."""

    def __init__(self, spec: WorkloadSpec, num_clients: int, num_rounds: int, folder: Path) -> None:
        self._spec, self._num_clients, self._num_rounds = spec, num_clients, num_rounds
        self._folder = folder
        self._load = Load(value=float(num_clients), unit="clients")
        self._salt = str(time.time_ns())
        self._cells: list[Cell] = []

    def run(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Every round pairs the engines; their order turns."""
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        calibrations = []
        with ExitStack() as stack:
            engines = [stack.enter_context(Engine(name, command, self._folder / "logs" / f"{place}.log"))
                       for place, (name, command) in enumerate(commands.items())]
            for number in range(1, self._num_rounds + 1):
                calibrations.append(calibrate())
                for engine in engines if number % 2 else reversed(engines):
                    self._cells.append(self._measure(engine, number))
        contestants = [Contestant(name=name, kind="peer", about="In a process of its own, without HTTP.",
                                  facts={"command": " ".join(command)}) for name, command in commands.items()]
        comparison = Comparison(setup=self._setup(calibrations), contestants=contestants, loads=[self._load],
                                cells=self._cells, baseline=contestants[0].name, num_rounds_asked=self._num_rounds)
        write_requests(self._folder / "requests.jsonl", self._requests(1))
        for cell in self._cells:
            write_cell(self._folder, cell)
        write_run(self._folder, comparison)
        write_report(self._folder, comparison, f"{self._spec.name}, {self._load.name}, in process")

    def _requests(self, number: int, warm_up: str = "") -> list[Asked]:
        return requests_of(self._spec, f"{self._salt}/{number}{warm_up}")

    def _measure(self, engine: Engine, number: int) -> Cell:
        warm_up = self._requests(number, "/warm-up")[: min(self._num_clients, WARM_UP_REQUESTS)]
        engine.run([replace(one, num_output_tokens=min(one.num_output_tokens, WARM_UP_TOKENS)) for one in warm_up],
                   self._num_clients)
        records = engine.run(self._requests(number), self._num_clients)
        facts = CellFacts(name=f"{self._load.name}/{number}", concurrency=self._num_clients)
        cell = Cell(contestant=engine.name, load=self._load, round=number, records=records, facts=facts)
        print(f"in process, round {number} of {self._num_rounds}, {self._load.name}, {engine.name}: "
              f"{cell.summary['throughput']['output_tokens_per_second']:,.0f} output tokens/s", flush=True)
        return cell

    def _setup(self, calibrations: Sequence[dict[str, float]]) -> dict[str, dict[str, Any]]:
        return {
            "run": {"command": "scripts/bench_peers.py", "commit": commit()}, "machine": machine_facts(),
            "workload": {"workload": self._spec.name, "requests": self._spec.num_requests, "salt": self._salt},
            "load": {"rounds": self._num_rounds, "order": "engines one after another, in reverse in every second round",
                     "client": "scripts/in_process.py: the loop is in the engine's process, and nothing becomes text"},
            "calibration": calibration_facts(calibrations)}
