"""The composition root: the only file that names concrete policies, caches, executors and backends. Everything else is
handed what it needs."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from . import __version__, logs
from .clock import WallClock
from .config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from .engine import llm as llm_module
from .engine.async_engine import AsyncEngine, ServedModel
from .engine.core import EngineCore
from .engine.detokenizer import StopFinder
from .engine.events import AnyListener, EngineEvents
from .engine.journal import Journal
from .engine.journal_file import LineFile, check_writable
from .engine.messages import PolicyState, Ready, RequestOutput
from .engine.queue_limits import QueueLimits
from .engine.transport import TRANSPORTS
from .errors import ConfigError, ModelError
from .kv.groups import KVGroup
from .kv.manager import KVCacheManager
from .kv.prefix_hash import PREFIX_CACHES
from .model.chat_template import ChatTemplate, template_from_file
from .model.decoder import estimated_weights_bytes, record_decoder
from .model.layer_groups import LayerGroup, layer_groups
from .model.load_progress import LoadProgress
from .model.loader import ModelFiles, open_model
from .model.packing_errors import packing_error
from .model.rope import rope_choice
from .ops.backends import make_backend
from .ops.interface import Backend, KVSpec, PackedLinear
from .ops.program import Program
from .policy_book import PolicyBook
from .presets import DEFAULT_PRESET, engine_config
from .runner.executor import ModelExecutor
from .runner.kv_tensors import check_kv_memory, check_tables_memory, check_weights_memory, kv_spec
from .sched.admission import ADMISSIONS, ASSURING_ADMISSIONS
from .sched.batching import REGIMES
from .sched.chunking import CHUNKINGS
from .sched.gate import GATES
from .sched.ordering import ORDERINGS
from .sched.plan import SchedulerOutput, StepResult
from .sched.policies import Policies
from .sched.preemption import PREEMPTIONS, PREEMPTIONS_TO_COME, VICTIM_RULES
from .sched.scheduler import Scheduler
from .sched.setup import SchedulerSetup

T = TypeVar("T")


def choose(table: Mapping[str, T], name: str, knob: str) -> T:
    """The entry a configuration names. Names resolve here only."""
    if name not in table:
        raise ConfigError(f"{knob}={name!r} is unknown; choose from {sorted(table)}")
    return table[name]


def build_policies(config: SchedulerConfig) -> Policies:
    """Raises ConfigError for unknown names, and for names that do not go together."""
    if config.preemption in PREEMPTIONS_TO_COME:
        raise ConfigError(f"preemption={config.preemption!r} is not built yet; choose from {sorted(PREEMPTIONS)}")
    choose(ADMISSIONS, config.admission, "admission")
    if config.preemption == "never" and config.admission not in ASSURING_ADMISSIONS:
        raise ConfigError(f"preemption='never' needs an admission that assures a request's blocks to its end, one of "
                          f"{sorted(ASSURING_ADMISSIONS)}; admission={config.admission!r} does not")
    return Policies(
        regime=choose(REGIMES, config.regime, "regime"),
        gate=choose(GATES, config.gate, "gate"),
        ordering=choose(ORDERINGS, config.ordering, "ordering"),
        admission=choose(ADMISSIONS, config.admission, "admission"),
        preemption=choose(PREEMPTIONS, config.preemption, "preemption"),
        victim=choose(VICTIM_RULES, config.victim, "victim"),
        chunking=choose(CHUNKINGS, config.chunking, "chunking"),
    )


def max_step_tokens(config: SchedulerConfig, max_model_len: int) -> int:
    """The most tokens of one request that a step may run."""
    most = config.max_num_batched_tokens
    return max(most, max_model_len) if CHUNKINGS[config.chunking].stalls_decode else most


def check_names(config: EngineConfig) -> None:
    """A wrong name is told before anything is loaded."""
    build_policies(config.scheduler)
    choose(PREFIX_CACHES, config.cache.prefix_cache, "prefix_cache")
    if config.journal.journal is not None:
        check_writable(config.journal.journal)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model packed for one backend; engines of different schedules and KV memory can be assembled around it."""

    files: ModelFiles
    backend: Backend
    program: Program
    config: ModelConfig
    max_model_len: int    # tokens the program's tables reach

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        return layer_groups(self.files.spec, self.max_model_len)

    @property
    def weight_forms(self) -> dict[str, int]:
        """Bytes by packed form; a matrix used twice (tied head) counts once."""
        sizes: dict[str, int] = {}
        for packed in {id(w): w for w in self.program.weights.values() if isinstance(w, PackedLinear)}.values():
            sizes[packed.form] = sizes.get(packed.form, 0) + packed.num_bytes
        return sizes

    @property
    def conversions(self) -> list[dict[str, Any]]:
        """What each type of the file became: matrices, weights, packed bytes, and what that step loses (a relative root
        mean square error; 0: nothing, None: not measured)."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for packed in {id(w): w for w in self.program.weights.values() if isinstance(w, PackedLinear)}.values():
            for source_type, num_outputs in packed.sources:
                row = found.setdefault((source_type, packed.form), {
                    "from": source_type, "to": packed.form, "matrices": 0, "weights": 0, "packed_bytes": 0,
                    "relative_error": packing_error(source_type, packed.form)})
                row["matrices"] += 1
                row["weights"] += num_outputs * packed.num_inputs
                row["packed_bytes"] += packed.num_bytes * num_outputs // packed.num_outputs
        return [found[key] for key in sorted(found)]

    @property
    def fingerprint(self) -> str:
        """Names everything a token depends on beside the request: build, path, weight forms, KV dtype, the files."""
        forms = "+".join(sorted(self.weight_forms))
        rope = rope_choice(self.files.spec.rope_scaling, self.max_model_len)
        return "-".join((f"paceline_{__version__}", self.backend.path_name, forms, f"kv_{self.config.kv_dtype}",
                         *([] if rope is None else [rope]), self.files.model_hash[:8]))


@dataclass(frozen=True, slots=True)
class Engine:
    """A core ready to step, what its front must know, and the memory it holds."""

    core: EngineCore
    executor: ModelExecutor
    kv: KVSpec
    ready: Ready
    setup: SchedulerSetup
    journal: Journal | None = None

    def close(self) -> None:
        if self.journal is not None and (trouble := self.journal.close()):
            notice(f"the journal ends before the engine: {trouble}")
        self.executor.close()


@lru_cache(maxsize=1)
def opened(name: str, revision: str | None = None) -> ModelFiles:
    """The model's files; the engine and its front share them when they share a process."""
    return open_model(name, revision)


def load_model(config: ModelConfig, progress: Callable[[int, int], None] | None = None) -> LoadedModel:
    """Packs the weights. progress is told (weights packed, weights in all) after each matrix."""
    files = opened(config.model, config.revision)
    limit = files.spec.max_position
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len={config.max_model_len} is beyond what the model was trained for: {limit}")
    backend = make_backend(config.isa, config.num_threads, notice, config.run_ahead == "on")
    max_model_len = config.max_model_len or limit
    check_weights_memory(estimated_weights_bytes(files.spec, files.weights, config.dtype))
    check_tables_memory(max_model_len, files.spec.rotated_dims)
    program = record_decoder(files.spec, files.weights, backend, config.dtype, max_model_len, progress)
    return LoadedModel(files, backend, program, config, max_model_len)


def notice(text: str) -> None:
    """For a person: through the log where there is one."""
    logger = logging.getLogger("paceline")
    if logger.handlers:
        logger.warning(text)
    else:
        print(f"paceline: {text}", file=sys.stderr, flush=True)


def assemble(loaded: LoadedModel, cache: CacheConfig, sched: SchedulerConfig, keep_logits: bool = False) -> Engine:
    """Binds KV memory and a schedule to a loaded model."""
    kv = kv_spec(loaded.files.spec, loaded.groups, cache, loaded.config.kv_dtype)
    check_kv_memory(kv)
    clock = WallClock()
    setup = SchedulerSetup(
        scheduler=sched, prefix_cache=cache.prefix_cache, num_blocks=kv.num_blocks, block_size=kv.block_size,
        windows=tuple(group.window for group in loaded.groups), max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.files.eos_token_ids)
    scheduler = build_scheduler(setup)
    executor = ModelExecutor(loaded.backend.bind(loaded.program, kv), kv, clock, keep_logits, len(loaded.groups))
    stops = StopFinder(loaded.files.tokenizer, scheduler.output_token_ids)
    events = EngineEvents(_report_listener, (ForgetStops(stops), TellFailures()))
    book = PolicyBook(cache, build_policies, reads_priority)
    core = EngineCore(scheduler, executor, clock, events, stops, book)
    return Engine(core, executor, kv, _ready(loaded, scheduler, kv, book.describe(sched)), setup)


def build_scheduler(setup: SchedulerSetup) -> Scheduler:
    """A schedule without a model: for an engine, and for replaying a journal."""
    groups = tuple(KVGroup(window) for window in setup.windows)
    kv = KVCacheManager(setup.num_blocks, setup.block_size, choose(PREFIX_CACHES, setup.prefix_cache, "prefix_cache"),
                        groups, max_step_tokens(setup.scheduler, setup.max_model_len))
    return Scheduler(setup.scheduler, kv, build_policies(setup.scheduler), max_model_len=setup.max_model_len,
                     eos_token_ids=setup.eos_token_ids)


def kv_groups(loaded: LoadedModel) -> tuple[KVGroup, ...]:
    return tuple(KVGroup(group.window) for group in loaded.groups)


class ForgetStops:
    """Lets the stop finder drop what it knows of a request that has ended."""

    def __init__(self, stops: StopFinder) -> None:
        self._stops = stops

    def on_step(self, plan: SchedulerOutput, result: StepResult) -> None:
        pass

    def on_request_finished(self, output: RequestOutput) -> None:
        self._stops.forget((output.request_id,))


class TellFailures:
    """Says which requests a step failed, and why: their clients are told that it is not their fault."""

    def on_step(self, plan: SchedulerOutput, result: StepResult) -> None:
        for row in result.rows:
            if row.failure is not None:
                notice(f"step {result.step_id}: {row.request_id} ends with an error: {row.failure}")

    def on_request_finished(self, output: RequestOutput) -> None:
        pass


def _report_listener(listener: AnyListener, failure: Exception) -> None:
    notice(f"a listener was removed because it failed: {type(listener).__name__}: {failure}")


def reads_priority(sched: SchedulerConfig) -> bool:
    return sched.ordering == "priority" or sched.victim == "lowest_priority"


def _ready(loaded: LoadedModel, scheduler: Scheduler, kv: KVSpec, policy: PolicyState) -> Ready:
    notices = []
    if scheduler.limits.max_model_len < loaded.max_model_len:
        notices.append(
            f"the pool of {kv.num_blocks} blocks holds fewer tokens of a request than the model's "
            f"{loaded.max_model_len}: requests are limited to {scheduler.limits.max_model_len} tokens")
    return Ready(max_model_len=scheduler.limits.max_model_len, num_blocks=kv.num_blocks, block_size=kv.block_size,
                 fingerprint=loaded.fingerprint, notices=tuple(notices), reads_priority=policy.reads_priority,
                 policy=policy)


def chat_template(config: ModelConfig) -> ChatTemplate | None:
    """The model's own, or what --chat-template names instead of it."""
    files = opened(config.model, config.revision)
    if config.chat_template is None:
        return files.chat_template
    try:
        return template_from_file(Path(config.chat_template), files.tokenizer.special_tokens)
    except ModelError as error:
        raise ConfigError(f"--chat-template {error}") from error


def served_model(config: ModelConfig, ready: Ready) -> ServedModel:
    files = opened(config.model, config.revision)
    return ServedModel(
        tokenizer=files.tokenizer, chat_template=chat_template(config), max_model_len=ready.max_model_len,
        eos_token_ids=files.eos_token_ids, fingerprint=ready.fingerprint, reads_priority=ready.reads_priority,
        vocab_size=min(files.spec.vocab_size, files.tokenizer.vocab_size))


def load_engine(config: EngineConfig) -> Engine:
    """Files to a core ready to step: what an engine process runs first."""
    check_names(config)
    progress = LoadProgress(sys.stderr, WallClock())
    try:
        loaded = load_model(config.model, progress)
    finally:
        progress.finish()
    return with_journal(assemble(loaded, config.cache, config.scheduler), config)


def with_journal(engine: Engine, config: EngineConfig) -> Engine:
    """The engine, writing down what it decides where the configuration says so."""
    if config.journal.journal is None:
        return engine
    about = {"paceline": __version__, "fingerprint": engine.ready.fingerprint, "model": config.model.model,
             "model_hash": opened(config.model.model, config.model.revision).model_hash,
             "started_at": datetime.now(UTC).isoformat(timespec="seconds")}
    journal = Journal(LineFile(config.journal.journal), engine.setup, secrets.token_bytes(32),
                      config.journal.journal_tokens, about)
    engine.core.events.attach_recorder(journal)
    return replace(engine, journal=journal)


def load_engine_logged(config: EngineConfig, log_format: str, log_level: str) -> Engine:
    """The same in a process of its own, whose log is to look like its front's."""
    logs.configure(log_format, log_level)
    return load_engine(config)


def draw_seed() -> int:
    """The injected source of seeds for requests that bring none: 63 random bits."""
    return secrets.randbits(63)


def build_llm(config: EngineConfig) -> llm_module.LLM:
    chat_template(config.model)    # a mistake in it is told before the weights are packed
    return llm_around(load_engine(config), config.model)


def llm_around(engine: Engine, config: ModelConfig) -> llm_module.LLM:
    for text in engine.ready.notices:
        notice(text)
    served = served_model(config, engine.ready)
    return llm_module.LLM(engine.core, served, WallClock(), draw_seed, engine.close)


def LLM(model: str = "smollm2", *, preset: str = DEFAULT_PRESET, **knobs: Any) -> llm_module.LLM:
    """The engine as a library. knobs are those of ModelConfig, CacheConfig and SchedulerConfig, by name."""
    return build_llm(engine_config(preset, {"model": model, **knobs}))


def build_async_engine(config: EngineConfig, server: ServerConfig) -> AsyncEngine:
    load = partial(load_engine, config)
    if server.transport == "process":
        load = partial(load_engine_logged, config, server.log_format, server.log_level)
    transport = choose(TRANSPORTS, server.transport, "transport")(load)
    return AsyncEngine(transport, partial(served_model, config.model), QueueLimits.of(server), WallClock(),
                       server.step_timeout_seconds or None)


def async_engine_around(loaded: LoadedModel, config: EngineConfig) -> AsyncEngine:
    """An engine with a schedule and KV memory of its own around weights that several share; its loop is a thread."""
    def load() -> Engine:
        return with_journal(assemble(loaded, config.cache, config.scheduler), config)

    return AsyncEngine(TRANSPORTS["thread"](load), partial(served_model, config.model), QueueLimits.of(ServerConfig()),
                       WallClock(), None)


def serve(config: EngineConfig, server: ServerConfig) -> int:
    """`paceline serve`. Returns the exit status."""
    from .server.serve import serve as serve_http  # the HTTP stack is loaded by those who serve

    check_names(config)
    chat_template(config.model)
    if config.scheduler.regime == "dynamic" and config.scheduler.batch_timeout_seconds >= server.stall_seconds:
        raise ConfigError(f"batch_timeout_seconds={config.scheduler.batch_timeout_seconds} must be below stall_seconds="
                          f"{server.stall_seconds}: a batch that waits for others would read as a stalled engine")

    async def make_engine() -> AsyncEngine:
        engine = build_async_engine(config, server)
        await engine.start()
        try:
            await engine.ready()
        except BaseException:    # a bad knob, or a signal while loading: nobody else knows this engine
            await engine.stop()
            raise
        for text in engine.notices:
            notice(text)
        return engine

    info = {"block_size": str(config.cache.block_size), "kv_dtype": config.model.kv_dtype,
            "prefix_cache": config.cache.prefix_cache}
    return serve_http(make_engine, server, config.model.model, draw_seed, WallClock(), info)
