"""Every knob once: name, default, unit, meaning, and the limit it must respect. Command-line flags are generated from
these declarations; nothing is overwritten after construction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import lru_cache
from typing import Any

from .errors import ConfigError

BLOCK_SIZES = (16, 32, 64)
WEIGHT_FORMS = ("f32", "bf16", "int8", "int4")
KV_DTYPES = ("f32", "bf16")
ISA_NAMES = ("auto", "portable", "avx2", "avx512", "numpy")


def knob(default: Any, help: str, *, choices: tuple[Any, ...] | None = None, least: float | None = None,
         most: float | None = None, flag: bool = True) -> Any:
    """Declares one knob. `least` and `most` are inclusive; a default of None means the value is derived."""
    limits = {"choices": choices, "least": least, "most": most}
    return field(default=default, metadata={"help": help, "flag": flag, **limits})


@lru_cache(maxsize=8)
def tenant_weights(text: str) -> Mapping[str, float]:
    """"a=2,b=0.5" -> weights by tenant. A comma or an equals sign cannot be part of a tenant's name here."""
    weights: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        tenant, _, weight = part.rpartition("=")
        try:
            weights[tenant.strip()] = float(weight)
        except ValueError:
            weights[""] = 0.0
    if "" in weights or not all(0.001 <= weight <= 1000 for weight in weights.values()):
        raise ConfigError(f"tenant_weights={text!r} is not of the form tenant=weight,tenant=weight, with weights "
                          "between 0.001 and 1000")
    return weights


def _check(config: Any) -> None:
    for declared in fields(config):
        _check_one(declared, getattr(config, declared.name))


def _check_one(declared: Field[Any], value: Any) -> None:
    meta = declared.metadata
    if not meta or value is None:
        return
    if meta["choices"] is not None and value not in meta["choices"]:
        raise ConfigError(f"{declared.name}={value!r} is unknown; choose from {list(meta['choices'])}")
    if meta["least"] is not None and not value >= meta["least"]:    # `not >=` also refuses NaN
        raise ConfigError(f"{declared.name} must be at least {meta['least']}, got {value}")
    if meta["most"] is not None and not value <= meta["most"]:
        raise ConfigError(f"{declared.name} must be at most {meta['most']}, got {value}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What to serve and in which numbers."""

    model: str = knob("smollm2", "model: smollm2, a .gguf file, a directory, a hub id (owner/name or "
                      "owner/name:FILE.gguf), or dummy:NAME", flag=False)
    revision: str | None = knob(None, "branch, tag or commit of a hub id; default: its main branch")
    chat_template: str | None = knob(None, "file with a Jinja chat template to use instead of the model's own")
    dtype: str = knob("auto", "packed form of the weights; auto: the source's own", choices=("auto", *WEIGHT_FORMS))
    kv_dtype: str = knob("bf16", "number format of keys and values in the cache", choices=KV_DTYPES)
    max_model_len: int | None = knob(None, "tokens of prompt and output together; default: the model's limit", least=2)
    num_threads: int | None = knob(None, "compute threads; default: one per usable core", least=1, most=256)
    isa: str = knob("auto", "instruction-set path: auto, portable, avx2, avx512, or numpy (the slow reference)",
                    choices=ISA_NAMES)
    run_ahead: str = knob("on", "on: while the schedule looks at what a step drew, idle threads begin the step that "
                          "follows if everybody goes on, and give it up if another is asked for; the same bits. Needs "
                          "two threads and the compiled kernels. off: they wait", choices=("on", "off"))

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """KV memory: how much, in what pieces, what is reused."""

    block_size: int = knob(16, "tokens a KV block holds", choices=BLOCK_SIZES)
    num_kv_blocks: int | None = knob(None, "KV blocks in the pool; default: what kv_memory_bytes holds", least=1)
    kv_memory_bytes: int = knob(1 << 30, "bytes for the KV pool when num_kv_blocks is not given", least=1)
    prefix_cache: str = knob("hash", "reuse of equal prompt prefixes: none or hash")
    kv_pages: str = knob("early", "when the system gives the memory of the KV pool: early (after the start, in time "
                         "that nobody else wants; all of it stays resident) or late (as it is first written, which "
                         "makes prompts some 8% slower until all of the pool has been used)",
                         choices=("early", "late"))

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Who runs next. The names resolve in build.py; presets.py bundles them."""

    max_num_seqs: int = knob(64, "requests running at once", least=1, most=4096)
    max_num_batched_tokens: int = knob(512, "token budget of one step, prefill and decode together", least=1,
                                       most=1 << 20)
    watermark: float = knob(0.01, "fraction of the blocks that admission leaves free", least=0.0, most=0.9)
    regime: str = knob("continuous", "when requests may join the running batch: static (when all of it has ended), "
                       "static_padded (likewise, and finished rows run on), dynamic (likewise, once it would be full "
                       "or batch_timeout_seconds have passed) or continuous (at any step)")
    batch_timeout_seconds: float = knob(0.05, "under regime dynamic, seconds that a batch which is not full waits for "
                                        "others, counted from the arrival of its oldest request", least=0.0, most=60.0)
    ordering: str = knob("fcfs", "who is admitted first: fcfs, priority, shortest_prompt, longest_prefix (most tokens "
                         "in the prefix cache), fair (tenants get equal service) or deadline (earliest first; what "
                         "cannot end in time is refused)")
    priority_aging_seconds: float | None = knob(
        None, "seconds of waiting that count as one level of priority; default: waiting counts for nothing, and a "
        "request may wait for ever", least=0.001)
    aging_tokens_per_second: float = knob(
        100.0, "tokens that a second of waiting counts as, against shorter prompts or longer cached prefixes",
        least=0.001)
    tenant_weights: str = knob("", "shares of tenants, as tenant=weight,tenant=weight; the weight of others is 1")
    fair_input_weight: float = knob(1.0, "what a computed prompt token counts as in a tenant's service", least=0.0,
                                    most=1000.0)
    fair_output_weight: float = knob(2.0, "what a generated token counts as in a tenant's service", least=0.001,
                                     most=1000.0)
    admission: str = knob("watermark", "what must be free before a request starts: watermark (blocks of the tokens "
                          "known now, and a margin), reserve (blocks up to max_tokens: nobody is preempted) or "
                          "overcommit (blocks of the output that is likely)")
    overcommit_quantile: float = knob(
        0.9, "share of like requests whose output is no longer than what is counted on", least=0.01, most=1.0)
    gate: str = knob("none", "when the queue may interrupt those who run: none (always) or waiting_served (when enough "
                     "wait, or for long enough)")
    waiting_served_ratio: float = knob(0.3, "open the gate when this many wait for one that runs", least=0.0,
                                       most=1000.0)
    max_waiting_tokens: int = knob(20, "or when this many steps ran since a request last started", least=0)
    max_batch_prefill_tokens: int | None = knob(
        None, "tokens being prefilled at once; one request may always be; default: no limit but a step's", least=1)
    preemption: str = knob("recompute", "what happens when blocks run out: recompute (all of a victim's), "
                           "recompute_tail (its last blocks, as many as are missing) or never (needs an admission "
                           "that assures all blocks up front: reserve)")
    victim: str = knob("latest_arrival", "who gives its blocks back: latest_arrival, lowest_priority, most_blocks or "
                       "most_remaining")
    chunking: str = knob("fixed", "how a step's token budget is split: whole (a prompt in one step, decode stalls), "
                         "fixed (prefill takes what decode leaves) or itl_bounded (no more prefill beside decode than "
                         "holds itl_target_ms)")
    itl_target_ms: float = knob(50.0, "under chunking itl_bounded, milliseconds that a step with decodes may take by "
                                "the fitted step-time model", least=0.1)

    def __post_init__(self) -> None:
        _check(self)
        tenant_weights(self.tenant_weights)

    def weight_of_tenant(self, tenant: str) -> float:
        return tenant_weights(self.tenant_weights).get(tenant, 1.0) if self.tenant_weights else 1.0


# Knobs that count only under some policies: the concern, and the names that look at the knob.
READ_BY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "batch_timeout_seconds": ("regime", ("dynamic",)),
    "itl_target_ms": ("chunking", ("itl_bounded",)),
    "victim": ("preemption", ("recompute", "recompute_tail")),
    "watermark": ("admission", ("watermark",)),
    "overcommit_quantile": ("admission", ("overcommit",)),
    "priority_aging_seconds": ("ordering", ("priority",)),
    "aging_tokens_per_second": ("ordering", ("shortest_prompt", "longest_prefix")),
    "tenant_weights": ("ordering", ("fair",)),
    "fair_input_weight": ("ordering", ("fair",)),
    "fair_output_weight": ("ordering", ("fair",)),
    "waiting_served_ratio": ("gate", ("waiting_served",)),
    "max_waiting_tokens": ("gate", ("waiting_served",)),
}


def is_read(config: SchedulerConfig, name: str) -> bool:
    """Whether the policies chosen look at this knob."""
    concern, readers = READ_BY.get(name, ("", ()))
    return not concern or getattr(config, concern) in readers


def refuse_unread(config: SchedulerConfig, given: Iterable[str]) -> None:
    """A knob that was given and changes nothing is refused, with what would make it count."""
    for name in given:
        if not is_read(config, name):
            concern, readers = READ_BY[name]
            raise ConfigError(f"{name} has no effect with {concern}={getattr(config, concern)!r}; "
                              f"it is read by {concern} {' and '.join(readers)}")


@dataclass(frozen=True, kw_only=True)
class JournalConfig:
    """What an engine writes down of its schedule."""

    journal: str | None = knob(None, "file for a line a step of what was decided, for `paceline journal` and "
                               "`paceline replay`; holds no text and no token ids; an older one is kept as FILE.1")
    journal_tokens: bool = knob(False, "with --journal: write the token ids of prompts and outputs too")

    def __post_init__(self) -> None:
        _check(self)
        if self.journal is not None and not self.journal:
            raise ConfigError("journal: the name of a file is needed, got an empty one")
        if self.journal_tokens and self.journal is None:
            raise ConfigError("journal_tokens has no effect without journal, the file to write to")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP door."""

    host: str = knob("127.0.0.1", "address to listen on")
    port: int = knob(8000, "TCP port; 0 takes a free one", least=0, most=65535)
    served_model_name: str | None = knob(None, "name clients use, aliases after commas; default: the MODEL argument")
    transport: str = knob("thread", "where the engine loop runs: thread or process", choices=("thread", "process"))
    max_queue: int = knob(1024, "choices accepted and unfinished before new ones are refused", least=1)
    max_queue_tokens: int | None = knob(None, "the same limit in prompt tokens; default: none", least=1)
    max_queue_per_tenant: int | None = knob(None, "choices of one tenant accepted and unfinished; default: no limit",
                                            least=1)
    max_queue_tokens_per_tenant: int | None = knob(None, "prompt tokens of one tenant accepted and unfinished; "
                                                   "default: no limit", least=1)
    overload_status: int = knob(429, "HTTP status of a request refused because the queue is full", choices=(429, 503))
    max_body_bytes: int = knob(16 << 20, "largest request body; larger ones get 413", least=1024)
    max_json_depth: int = knob(64, "deepest nesting of a request body", least=4, most=512)
    grace_seconds: float = knob(30.0, "after SIGTERM, seconds for running requests to finish", least=0.0)
    stall_seconds: float = knob(120.0, "health turns 503 when work waits and no step ended for this long", least=1.0)
    step_timeout_seconds: float = knob(600.0, "a step that runs longer ends the engine and the process, with a stack "
                                       "dump; 0: never", least=0.0)
    strict_fields: bool = knob(False, "refuse unknown request fields instead of listing them in x-paceline-ignored")
    trust_request_chat_template: bool = knob(False, "let a request bring a chat template of its own (chat_template)")
    strict_max_tokens: bool = knob(False, "refuse max_tokens beyond the context instead of lowering it")
    api_key: str | None = knob(None, "require this key on every route except /health, /ping and /version; other users "
                               "of the machine see it in its list of processes, so better PACELINE_API_KEY or a file")
    api_key_file: str | None = knob(None, "file of keys, one a line, the name of its tenant after it if it has one")
    admin_key: str | None = knob(None, "key of the routes under /admin, which are closed without one; or "
                                 "PACELINE_ADMIN_KEY")
    open_metrics: bool = knob(False, "answer /metrics without a key")
    log_format: str = knob("text", "form of the log on standard error", choices=("text", "json"))
    log_level: str = knob("info", "least level that is logged; info has one line a request, without its text",
                          choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        _check(self)

    @property
    def max_call_choices(self) -> int:
        """A call with more choices than this can never be accepted."""
        return min(self.max_queue, self.max_queue_per_tenant or self.max_queue)

    @property
    def max_call_tokens(self) -> int | None:
        """The same for the tokens of its prompts."""
        limits = [limit for limit in (self.max_queue_tokens, self.max_queue_tokens_per_tenant) if limit is not None]
        return min(limits, default=None)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    journal: JournalConfig = field(default_factory=JournalConfig)
