"""Schedules without a model: the real scheduler on the executor that stands in for one, its journal beside the result.

What is built from which names is decided in build.py; the lab is handed its functions.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, cast

from ...clock import VirtualClock
from ...config import SchedulerConfig
from ...engine.core import EngineCore
from ...engine.events import AnyListener, EngineEvents, Listener
from ...engine.journal import Journal
from ...engine.messages import EngineStats, RequestOutput, Submit
from ...errors import ConfigError
from ...presets import engine_config
from ...request import SamplingParams
from ...sched.admission import AdmissionRule
from ...sched.plan import KVLayout
from ...sched.scheduler import Scheduler
from ...sched.setup import SchedulerSetup
from ...sim.run import Watch, ignore, run_arrivals, run_closed_loop
from ...sim.sim_executor import END, SimExecutor, StepSeconds

MakeScheduler: TypeAlias = Callable[[SchedulerSetup], Scheduler]
KEY = bytes(32)    # nothing is secret here, and with a fixed key the same run writes the same journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run. requests come at their arrival_time, or from so many clients with `concurrency`. step_seconds and
    ends_at: see SimExecutor."""

    name: str
    preset: str
    knobs: Mapping[str, Any]
    requests: Sequence[Submit]
    num_blocks: int
    block_size: int
    max_model_len: int
    step_seconds: StepSeconds | None = None
    ends_at: Mapping[str, int] = field(default_factory=dict)
    concurrency: int | None = None

    def setup(self) -> SchedulerSetup:
        config = engine_config(self.preset, self.knobs)
        return SchedulerSetup(
            scheduler=config.scheduler, prefix_cache=config.cache.prefix_cache, num_blocks=self.num_blocks,
            block_size=self.block_size, windows=(None,), max_model_len=self.max_model_len,
            eos_token_ids=frozenset({END}) if self.ends_at else frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of a cell. seconds are virtual: steps, where a step is the unit."""

    stats: EngineStats
    seconds: float
    config: SchedulerConfig
    finished: Sequence[RequestOutput]
    journal: str | None

    @property
    def idle_share(self) -> float:
        """Slot-steps without a row, of max_num_seqs times the steps that ran."""
        return self.stats.num_idle_slot_steps / self.stats.num_slot_steps

    def facts(self) -> dict[str, Any]:
        return {"steps": self.stats.num_steps, "slots": self.config.max_num_seqs, "regime": self.config.regime,
                "slot_steps": self.stats.num_slot_steps, "idle_slot_steps": self.stats.num_idle_slot_steps,
                "output_tokens": self.stats.num_generation_tokens, "preemptions": self.stats.num_preemptions,
                "journal": self.journal}


class Lines(Protocol):
    def write(self, line: bytes, /) -> int: ...

    def close(self) -> None: ...


class LinesOf:
    """A journal's sink that writes as it is told to: here nobody waits for a step."""

    def __init__(self, file: Lines) -> None:
        self._file = file

    def put(self, line: bytes) -> None:
        self._file.write(line)

    def close(self) -> None:
        self._file.close()


class Lab:
    """Runs cells. output: the folder for journals and pictures; None: none are written."""

    def __init__(self, make_scheduler: MakeScheduler, output: Path | None = None) -> None:
        self._make_scheduler = make_scheduler
        self.output = output

    def run(self, cell: Cell, listeners: Iterable[Listener] = (), admission: AdmissionRule | None = None,
            watch: Watch = ignore) -> Ran:
        """admission: a rule that no configuration names, in place of the cell's. `paceline replay` does not know it."""
        setup, clock = cell.setup(), VirtualClock()
        layout = KVLayout(cell.num_blocks, cell.block_size, bytes_per_block=0)
        events = EngineEvents(_raise, tuple(listeners))
        journal, path = self._journal(cell, setup)
        if journal is not None:
            events.attach_recorder(journal)
        executor = SimExecutor(layout, clock, cell.step_seconds, cell.ends_at)
        scheduler = self._make_scheduler(setup)
        if admission is not None:
            scheduler.policies = replace(scheduler.policies, admission=admission)
        core = EngineCore(scheduler, executor, clock, events)
        finished: list[RequestOutput] = []

        def note(output: RequestOutput, now: float) -> None:
            watch(output, now)
            if output.finish_reason is not None:
                finished.append(output)

        if cell.concurrency is None:
            run_arrivals(core, clock, cell.requests, note)
        else:
            run_closed_loop(core, clock, cell.requests, cell.concurrency, note)
        if journal is not None:
            journal.close()
        return Ran(stats=scheduler.stats(), seconds=clock.now(), config=setup.scheduler, finished=finished,
                   journal=path)

    def write(self, name: str, content: str) -> str | None:
        """A picture or a table beside the journals. Returns its path; None where nothing is written."""
        if self.output is None:
            return None
        path = self.output / name
        path.write_text(content, encoding="utf-8")
        return str(path)

    def _journal(self, cell: Cell, setup: SchedulerSetup) -> tuple[Journal | None, str | None]:
        if self.output is None:
            return None, None
        path = self.output / f"{cell.name}.jsonl.gz"
        file = cast(BinaryIO, gzip.GzipFile(path, "wb", compresslevel=1, mtime=0))
        about = {"model": "none: simulated", "preset": cell.preset}
        return Journal(LinesOf(file), setup, KEY, about=about), str(path)


def made_output(path: str | None) -> Path | None:
    """The folder, made where it is not there. Raises ConfigError where it cannot be."""
    if path is None:
        return None
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output {path}: cannot be made: {error.strerror or error}") from error
    return Path(path)


def request(number: int, num_output_tokens: int, prompt_token_ids: tuple[int, ...] = (2,),
            arrival_time: float = 0.0) -> Submit:
    """One that ends after exactly so many tokens. With a prompt of one token its first step is like all others, so it
    takes as many steps as it has output tokens."""
    sampling = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
    return Submit(request_id=id_of(number), prompt_token_ids=prompt_token_ids, sampling=sampling,
                  arrival_time=arrival_time)


def id_of(number: int) -> str:
    """Sorts as the number does: of requests that arrive at once, the lowest id is first."""
    return f"r{number:05d}"


def _raise(listener: AnyListener, error: Exception) -> None:
    raise error
