"""The named loads: uniform, decode-heavy, chat, recorded traffic and the others, as lists of requests.

What is asked (lengths, order, who waits for whom) depends on the spec and its seed alone: it is the same in every cell
and for every target. The words depend on the cell's salt as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ..errors import ConfigError
from .drafts import WRITERS, Draft, Part, write
from .lengths import Lengths, parse_lengths
from .records import Asked
from .traces import MOONCAKE_BLOCK_TOKENS, read_trace


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """Which load. None: the workload's own value."""

    name: str = "uniform"
    num_requests: int = 100
    seed: int = 0
    prompts: str = "ids"                      # ids | text | messages
    first_token_id: int = 1_000               # ids are drawn from [first, end): ordinary tokens of usual vocabularies
    end_token_id: int = 20_000
    prompt_tokens: str | None = None          # N or A..B: of the prompt; of the own part where prompts are shared
    output_tokens: str | None = None
    prefix_tokens: int | None = None          # of the shared beginning
    fan_out: int | None = None                # requests that share one beginning
    turns: str | None = None                  # N or A..B: requests of a conversation or agent
    think_seconds: float | None = None        # mean between an answer and the next turn (exponential)
    trace: str | None = None                  # file of recorded traffic
    length_scale: float = 1.0                 # on recorded lengths
    max_context: int | None = None            # tokens of prompt and output together; longer prompts are cut to fit

    def __post_init__(self) -> None:
        if self.name not in WORKLOADS:
            raise ConfigError(f"workload={self.name!r} is unknown; choose from {sorted(WORKLOADS)}")
        if self.prompts not in WRITERS:
            raise ConfigError(f"prompts={self.prompts!r} is unknown; choose from {sorted(WRITERS)}")
        for knob, least in (("num_requests", 1), ("prefix_tokens", 1), ("fan_out", 1), ("think_seconds", 0),
                            ("max_context", 2), ("first_token_id", 0)):
            value = getattr(self, knob)
            if value is not None and not value >= least:
                raise ConfigError(f"{knob} must be at least {least}, got {value}")
        if self.end_token_id <= self.first_token_id:
            raise ConfigError(f"end_token_id={self.end_token_id} must be above first_token_id={self.first_token_id}")
        if not self.length_scale > 0:
            raise ConfigError(f"length_scale must be above 0, got {self.length_scale}")
        self._refuse_what_has_no_effect()

    def _refuse_what_has_no_effect(self) -> None:
        takes = WORKLOADS[self.name].takes
        defaults = {"length_scale": 1.0}
        for knob in ("prompt_tokens", "output_tokens", "prefix_tokens", "fan_out", "turns", "think_seconds", "trace",
                     "length_scale"):
            if getattr(self, knob) != defaults.get(knob) and knob not in takes:
                raise ConfigError(f"{knob} has no effect on workload {self.name!r}, which takes {', '.join(takes)}")


Make: TypeAlias = Callable[[WorkloadSpec, np.random.Generator], list[Draft]]


@dataclass(frozen=True, slots=True)
class Workload:
    make: Make
    takes: tuple[str, ...]
    about: str


def draft(spec: WorkloadSpec) -> list[Draft]:
    """The load without its words. Raises ConfigError for a spec that means nothing, and for a bad trace."""
    drafts = WORKLOADS[spec.name].make(spec, np.random.default_rng(spec.seed))[: spec.num_requests]
    return drafts if spec.max_context is None else [_cut(one, spec.max_context) for one in drafts]


def requests_of(spec: WorkloadSpec, salt: str) -> list[Asked]:
    """The requests of one cell: give each cell a salt of its own."""
    return write(draft(spec), WRITERS[spec.prompts](salt, spec.first_token_id, spec.end_token_id), spec.name)


def _cut(one: Draft, max_context: int) -> Draft:
    """The prompt loses its end, then the answer its length, until both fit."""
    num_output = min(one.num_output_tokens, max_context - 1)
    room = max_context - num_output
    parts: list[Part] = []
    for part in one.parts:
        if room > 0:
            parts.append(replace(part, num_tokens=min(part.num_tokens, room)))
        room -= part.num_tokens
    return replace(one, parts=tuple(parts), num_output_tokens=num_output)


# --- prompts that share nothing --------------------------------------------------------------------------------------


def _single(prompt: Lengths, output: Lengths) -> Make:
    def make(spec: WorkloadSpec, rng: np.random.Generator) -> list[Draft]:
        prompts, outputs = _override(spec.prompt_tokens, prompt, "prompt_tokens"), _override(
            spec.output_tokens, output, "output_tokens")
        return [Draft(parts=(Part((number,), prompts.draw(rng)),), num_output_tokens=outputs.draw(rng))
                for number in range(spec.num_requests)]

    return make


def _override(text: str | None, own: Lengths, knob: str) -> Lengths:
    return own if text is None else parse_lengths(text, own.kind, knob)


def _range(least: int, most: int) -> Lengths:
    return Lengths("uniform", least, most)


# --- prompts that share a beginning -----------------------------------------------------------------------------------


def shared_prefix(spec: WorkloadSpec, rng: np.random.Generator) -> list[Draft]:
    """Beginnings of prefix_tokens, each shared by fan_out requests that come one after another."""
    own = _override(spec.prompt_tokens, Lengths("fixed", 100, 100), "prompt_tokens")
    outputs = _override(spec.output_tokens, Lengths("fixed", 32, 32), "output_tokens")
    prefix_tokens, fan_out = spec.prefix_tokens or 1000, spec.fan_out or 8
    return [Draft(parts=(Part(("prefix", number // fan_out), prefix_tokens, "system"), Part((number,), own.draw(rng))),
                  num_output_tokens=outputs.draw(rng)) for number in range(spec.num_requests)]


@dataclass(frozen=True, slots=True)
class _Talk:
    """The laws of a conversation: what comes before it, and of each turn."""

    opening: tuple[Part, ...]
    turns: Lengths
    question: Lengths
    answer: Lengths
    think_seconds: float
    label: str | None = None


def _converse(drafts: list[Draft], talk: _Talk, rng: np.random.Generator) -> None:
    """Adds one conversation. Each turn's prompt is all that was said; the answers in it are scripted, so that every
    target gets the same prompts: a prefix cache finds the turns before, up to the last answer."""
    number = len(drafts)
    said = list(talk.opening)
    for turn in range(talk.turns.draw(rng)):
        said.append(Part(("question", number, turn), talk.question.draw(rng)))
        answer = Part(("answer", number, turn), talk.answer.draw(rng), "assistant")
        think = float(rng.exponential(talk.think_seconds)) if turn else 0.0
        drafts.append(Draft(parts=tuple(said), num_output_tokens=answer.num_tokens, think_seconds=think,
                            after=(len(drafts) - 1,) if turn else (), tenant=talk.label, slo=talk.label))
        said.append(answer)


def chat(spec: WorkloadSpec, rng: np.random.Generator) -> list[Draft]:
    system = Part(("system",), spec.prefix_tokens or 100, "system")
    return _conversations(spec, rng, lambda number: _Talk(
        (system,), _override(spec.turns, _range(3, 6), "turns"),
        _override(spec.prompt_tokens, _range(20, 120), "prompt_tokens"),
        _override(spec.output_tokens, _range(40, 200), "output_tokens"), _or(spec.think_seconds, 2.0)))


def long_document(spec: WorkloadSpec, rng: np.random.Generator) -> list[Draft]:
    documents = _override(spec.prompt_tokens, _range(1500, 3000), "prompt_tokens")
    return _conversations(spec, rng, lambda number: _Talk(
        (Part(("document", number), documents.draw(rng)),), _override(spec.turns, _range(3, 5), "turns"),
        _range(20, 60), _override(spec.output_tokens, _range(30, 120), "output_tokens"), _or(spec.think_seconds, 2.0)))


def agentic(spec: WorkloadSpec, rng: np.random.Generator) -> list[Draft]:
    """Three agents of many short dependent calls, then one long document, and again."""
    tools = Part(("tools",), spec.prefix_tokens or 300, "system")
    document = _override(spec.prompt_tokens, _range(1500, 2500), "prompt_tokens")

    def talk(number: int) -> _Talk:
        if number % 4 == 3:
            own = Part(("document", number), document.draw(rng))
            return _Talk((own,), Lengths("fixed", 1, 1), _range(20, 60), _range(8, 32), 0.0, "document")
        return _Talk((tools,), _override(spec.turns, _range(6, 12), "turns"), _range(20, 100),
                     _override(spec.output_tokens, _range(16, 64), "output_tokens"), _or(spec.think_seconds, 0.3),
                     "agent")

    return _conversations(spec, rng, talk)


def _conversations(spec: WorkloadSpec, rng: np.random.Generator, talk: Callable[[int], _Talk]) -> list[Draft]:
    drafts: list[Draft] = []
    number = 0
    while len(drafts) < spec.num_requests:
        _converse(drafts, talk(number), rng)
        number += 1
    return drafts


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


# --- recorded traffic -------------------------------------------------------------------------------------------------


def _recorded(packaged: str | None) -> Make:
    def make(spec: WorkloadSpec, rng: np.random.Generator) -> list[Draft]:
        source = packaged or spec.trace
        if source is None:
            raise ConfigError(f"workload {spec.name!r} needs trace, the file to read")
        block = max(1, round(MOONCAKE_BLOCK_TOKENS * spec.length_scale))
        return [Draft(parts=_blocks(number, _scaled(row.num_prompt_tokens, spec), row.hash_ids, block),
                      num_output_tokens=_scaled(row.num_output_tokens, spec), arrival_seconds=row.arrival_seconds)
                for number, row in enumerate(read_trace(source)[: spec.num_requests])]

    return make


def _scaled(num_tokens: int, spec: WorkloadSpec) -> int:
    return max(1, round(num_tokens * spec.length_scale))


def _blocks(number: int, num_tokens: int, hash_ids: Sequence[int], block: int) -> tuple[Part, ...]:
    """A part for each prefix id; what they do not cover is the request's own."""
    parts = []
    for hash_id in hash_ids:
        if num_tokens > 0:
            parts.append(Part(("block", hash_id), min(block, num_tokens)))
        num_tokens -= block
    return (*parts, Part((number,), num_tokens)) if num_tokens > 0 else tuple(parts)


_LENGTHS = ("prompt_tokens", "output_tokens")
WORKLOADS: dict[str, Workload] = {
    "uniform": Workload(_single(_range(50, 2000), _range(10, 500)), _LENGTHS, "prompt 50..2000, output 10..500"),
    "decode-heavy": Workload(_single(_range(8, 32), _range(150, 250)), _LENGTHS, "prompt 8..32, output 150..250"),
    "mixed": Workload(_single(_range(176, 264), _range(32, 160)), _LENGTHS, "prompt 176..264, output 32..160"),
    "prefill-heavy": Workload(_single(_range(900, 1100), _range(8, 16)), _LENGTHS, "prompt 900..1100, output 8..16"),
    "exponential": Workload(
        _single(Lengths("exponential", 256, 256), Lengths("exponential", 128, 128)), _LENGTHS,
        "exponential lengths, means 256 and 128; beyond 8 means drawn again"),
    "geometric": Workload(
        _single(Lengths("geometric", 256, 256), Lengths("geometric", 128, 128)), _LENGTHS,
        "geometric lengths, means 256 and 128; beyond 8 means drawn again"),
    "fixed": Workload(_single(Lengths("fixed", 512, 512), Lengths("fixed", 128, 128)), _LENGTHS,
                      "prompt 512, output 128, always"),
    "shared-prefix": Workload(shared_prefix, (*_LENGTHS, "prefix_tokens", "fan_out"),
                              "1,000 tokens shared by 8 requests, each with 100 of its own; output 32"),
    "chat": Workload(chat, (*_LENGTHS, "prefix_tokens", "turns", "think_seconds"),
                     "conversations of 3..6 turns behind one system prompt, 2 s of thought between them"),
    "long-document": Workload(long_document, (*_LENGTHS, "turns", "think_seconds"),
                              "3..5 questions on a document of 1500..3000 tokens, 2 s of thought between them"),
    "agentic": Workload(agentic, (*_LENGTHS, "prefix_tokens", "turns", "think_seconds"),
                        "agents of 6..12 short calls, 0.3 s of tools between them, beside loads of documents"),
    "azure-conv": Workload(_recorded("azure-conv-2023"), ("length_scale",),
                           "conversations recorded by Azure in 2023, with their arrivals"),
    "azure-code": Workload(_recorded("azure-code-2023"), ("length_scale",),
                           "code completion recorded by Azure in 2023, with its arrivals (very bursty)"),
    "mooncake": Workload(_recorded(None), ("trace", "length_scale"),
                         "a trace file of Mooncake's form: arrivals, lengths, and which prompts share blocks"),
}
