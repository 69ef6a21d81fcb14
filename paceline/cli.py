"""The command line: paceline serve | generate | info | journal | replay | bench. Flags come from the knobs of
config.py; `--json` prints one JSON object on standard output and everything else goes to standard error. Exit status: 0
done, 1 the run failed, 2 the caller's mistake."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_args, get_type_hints

from .bench import kernels_command
from .config import CacheConfig, EngineConfig, JournalConfig, ModelConfig, SchedulerConfig, ServerConfig
from .errors import ConfigError, EngineError, ModelError, RequestError
from .presets import DEFAULT_PRESET, PRESETS, describe_preset, engine_config

Group = (type[ModelConfig] | type[CacheConfig] | type[SchedulerConfig] | type[JournalConfig] | type[ServerConfig])
SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("top_k", int, "draw from the k likeliest tokens (default: all)"),
    ("top_p", float, "draw from this share of probability (default: 1)"),
    ("min_p", float, "least probability, as a share of the likeliest token's (default: 0)"),
    ("typical_p", float, "draw from this share of probability, the most typical tokens first (default: 1)"),
    ("repetition_penalty", float, "on tokens of prompt and output; above 1 discourages (default: 1)"),
    ("presence_penalty", float, "off the logit of tokens the output has (default: 0)"),
    ("frequency_penalty", float, "the same, times how often it has them (default: 0)"),
    ("min_tokens", int, "generate so many before an end counts (default: 0)"),
    ("seed", int, "makes a draw repeatable (default: a random one, reported)"),
    ("logprobs", int, "with --json: each token's log-probability and those of so many best ones, 0 to 20"),
    ("prompt_logprobs", int, "with --json: the same of the prompt's tokens"),
    ("truncate_prompt_tokens", int, "keep the last so many tokens of the prompt; -1: as many as leave room"),
)
ENGINE_GROUPS: tuple[Group, ...] = (ModelConfig, CacheConfig, SchedulerConfig)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ConfigError, ModelError, RequestError) as mistake:
        print(f"paceline: {mistake}", file=sys.stderr)
        return 2
    except EngineError as failure:
        print(f"paceline: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, without forty lines of usage before it; takes no half-written flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="paceline", description="An LLM serving engine that owns its schedule.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = _command(commands, "serve", _serve, "serve a model over HTTP, OpenAI-compatible")
    _add_knobs(serve, JournalConfig)
    _add_knobs(serve, ServerConfig)
    generate = _command(commands, "generate", _generate, "complete one prompt and print it")
    _add_knobs(generate, JournalConfig)
    generate.add_argument("prompt", help="the text to continue, or with --chat the user's message")
    generate.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    _add_sampling(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object")
    _add_journal_commands(commands)
    _add_bench(commands)
    info = _command(commands, "info", _info, "what a model needs and what fits; with --preset "
                    "and no MODEL, what that preset is and where it comes from")
    info.add_argument("--quality", action="store_true",
                      help="also measure what the packed form costs: perplexity, greedy agreement and KL divergence "
                           "against f32 weights on a text of the package")
    info.add_argument("--profile", action="store_true",
                      help="also measure where the time of a step goes, operation by operation: decode of 1, 8 and 32 "
                           "rows, and a prompt of 512 tokens")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_journal_commands(commands: Any) -> None:
    journal = _plain_command(commands, "journal", _journal, "what a journal of --journal tells: counts, waits, a chart")
    journal.add_argument("file", metavar="FILE", help="a journal that serve or generate wrote")
    journal.add_argument("--width", type=int, help="columns of the chart (default: the terminal's)")
    journal.add_argument("--rows", type=int, default=40, help="requests in the chart, by arrival (default: 40)")
    journal.add_argument("--json", action="store_true", help="print one JSON object")
    replay = _plain_command(
        commands, "replay", _replay,
        "prove that a journal's arrivals and results lead to the same plans; exit status 1 and the first difference "
        "where they do not. With a preset or policy flags: what others would have planned (a counterfactual)")
    replay.add_argument("file", metavar="FILE", help="a journal that serve or generate wrote")
    replay.add_argument("--preset", metavar="NAME", help=f"other policies, one of: {', '.join(PRESETS)}")
    _add_knobs(replay, SchedulerConfig)
    _add_knobs(replay, CacheConfig, only=("prefix_cache", "num_kv_blocks"))
    replay.add_argument("--json", action="store_true", help="print one JSON object")


def _add_bench(commands: Any) -> None:
    bench = _plain_command(commands, "bench", None, "measure this engine")
    kinds = bench.add_subparsers(title="what", required=True, metavar="WHAT")
    core = _plain_command(kinds, "core", _bench_core,
                          "what planning a step and taking its result in cost, without a model, by running and waiting")
    core.add_argument("--preset", default="paceline", metavar="NAME",
                      help=f"the policies to run by, one of: {', '.join(PRESETS)} (default: paceline)")
    core.add_argument("--json", action="store_true", help="print one JSON object")
    kernels_command.add(kinds, _put)


def _plain_command(commands: Any, name: str, run: Any, help: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    command.set_defaults(run=run)
    return command


def _command(commands: Any, name: str, run: Any, help: str) -> argparse.ArgumentParser:
    command = _plain_command(commands, name, run, help)
    command.add_argument("model", metavar="MODEL", nargs="?" if name == "info" else None,
                         help=_declared(ModelConfig, "model").metadata["help"])
    command.add_argument("--preset", default=None, metavar="NAME",
                         help=f"bundle of policies, one of: {', '.join(PRESETS)} (default: paceline)")
    for group in ENGINE_GROUPS:
        _add_knobs(command, group)
    return command


def _add_sampling(command: argparse.ArgumentParser) -> None:
    """Flags of SamplingParams; what they may be is checked where the library checks it."""
    command.add_argument("--max-tokens", type=int, default=128, help="tokens to generate at most (default: 128)")
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    for name, kind, text in SAMPLING_FLAGS:
        metavar = name.split("_")[-1].upper()
        command.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)
    command.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    command.add_argument("--bad-words", action="append", metavar="WORD",
                         help="never complete this word's tokens; may be repeated")
    command.add_argument("--logit-bias", action="append", type=_bias, metavar="ID:BIAS",
                         help="added to a token's logit, -100 to 100; may be repeated")
    command.add_argument("--ignore-eos", action="store_true", default=None, help="generate past the end of the text")


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition(":")
    return int(token_id), float(bias)


def _declared(group: Group, name: str) -> Any:
    return next(field for field in fields(group) if field.name == name)


def _add_knobs(command: argparse.ArgumentParser, group: Group, only: Collection[str] | None = None) -> None:
    """One flag a knob. The parser's default is None throughout: absent must differ from given, for presets."""
    types = get_type_hints(group)
    for declared in fields(group):
        if not declared.metadata.get("flag", False) or (only is not None and declared.name not in only):
            continue
        flag = "--" + declared.name.replace("_", "-")
        kind = next(iter(t for t in get_args(types[declared.name]) if t is not type(None)), types[declared.name])
        text = declared.metadata["help"].replace("%", "%%")
        if kind is bool:
            command.add_argument(flag, action="store_true", default=None, help=text)
            continue
        if declared.default is not None and declared.default is not MISSING:
            text += f" (default: {declared.default})"
        command.add_argument(flag, type=kind, default=None, help=text, metavar=_metavar(declared))


def _metavar(declared: Any) -> str:
    choices = declared.metadata["choices"]
    return "|".join(str(choice) for choice in choices) if choices else declared.name.split("_")[-1].upper()


def configured(arguments: argparse.Namespace) -> EngineConfig:
    """Preset first, explicit flags over it."""
    groups = (*ENGINE_GROUPS, JournalConfig)
    given = {name: value for group in groups for name, value in _given(arguments, group).items()}
    if arguments.model is not None:
        given["model"] = arguments.model
    return engine_config(arguments.preset or DEFAULT_PRESET, given)


def _given(arguments: argparse.Namespace, group: Group) -> dict[str, Any]:
    names = [declared.name for declared in fields(group) if declared.metadata.get("flag", False)]
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


def _serve(arguments: argparse.Namespace) -> int:
    from .build import serve

    return serve(configured(arguments), ServerConfig(**_given(arguments, ServerConfig)))


def _generate(arguments: argparse.Namespace) -> int:
    from .build import build_llm

    names = ("max_tokens", "temperature", "stop", "bad_words", "logit_bias", "ignore_eos",
             *(name for name, _, _ in SAMPLING_FLAGS))
    sampling = {name: getattr(arguments, name) for name in names}
    with build_llm(configured(arguments)) as llm:
        if arguments.chat:
            completion = llm.chat([[{"role": "user", "content": arguments.prompt}]], show_progress=False, **sampling)[0]
        else:
            completion = llm.generate([arguments.prompt], show_progress=False, **sampling)[0]
    if arguments.temperature > 0 and arguments.seed is None and not arguments.json:
        print(f"paceline: seed {completion.seed}", file=sys.stderr)
    _put(json.dumps(completion.as_dict()) if arguments.json else completion.text)
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from .build import check_names
    from .info import describe, describe_profile, describe_quality, profile_table

    config = configured(arguments)
    if arguments.model is None:
        if arguments.preset is None or arguments.quality or arguments.profile:
            raise ConfigError("info: MODEL is needed, or --preset NAME alone to see what a preset is")
        check_names(config)
        facts = describe_preset(arguments.preset, config)
    else:
        facts = describe(config)
    if arguments.quality:
        facts |= describe_quality(config.model)
    profile = describe_profile(config.model) if arguments.profile else {}
    _put(json.dumps(facts | profile) if arguments.json else "\n\n".join([_ledger(facts), *profile_table(profile)]))
    return 0


def _journal(arguments: argparse.Namespace) -> int:
    from .journals import summary

    for name in ("width", "rows"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    width = arguments.width or max(shutil.get_terminal_size((100, 24)).columns - 22, 20)
    facts, chart = summary(arguments.file, width, arguments.rows)
    if arguments.json:
        _put(json.dumps(facts))
        return 0
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    _put(_ledger({name: section for name, section in facts.items() if section}) + "\n\n"
         + chart.text(is_unicode=is_unicode, has_colours=has_colours))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from . import journals

    knobs = _given(arguments, SchedulerConfig) | _given(arguments, CacheConfig)
    if arguments.preset is not None or knobs:
        facts = journals.rehearsed(arguments.file, arguments.preset, knobs)
        _put(json.dumps(facts) if arguments.json else journals.table(facts))
        return 0
    seen = journals.replayed(arguments.file)
    if arguments.json:
        _put(json.dumps(journals.replay_facts(seen)))
    elif seen.difference is None:
        _put(f"identical: {seen.num_steps} steps of {seen.num_requests} requests, every plan, end and counter")
    else:
        _put(f"first difference: {seen.difference}")
    return 0 if seen.difference is None else 1


def _bench_core(arguments: argparse.Namespace) -> int:
    from .bench import core_steps
    from .build import build_policies, build_scheduler

    sched = engine_config(arguments.preset, {}).scheduler
    build_policies(sched)    # a wrong name is told before anything runs
    timings = [core_steps.measure(build_scheduler, sched, *size) for size in core_steps.SIZES]
    facts = core_steps.facts(timings, arguments.preset)
    _put(json.dumps(facts) if arguments.json else core_steps.table(timings))
    return 0


def _ledger(facts: Mapping[str, Mapping[str, Any]]) -> str:
    width = max(len(name) for section in facts.values() for name in section)
    lines = []
    for title, section in facts.items():
        lines.append(title.replace("_", " "))
        lines += [f"  {name.replace('_', ' '):<{width}}  {_shown(name, value)}" for name, value in section.items()]
    return "\n".join(lines)


def _put(text: str) -> None:
    """Prints the result. Where nobody takes it, one line says so."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())    # the interpreter flushes once more at exit
        raise EngineError(f"the result cannot be written: {error.strerror}") from error


def _shown(name: str, value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        show = _conversion if name == "conversions" else _layer_group
        return "; ".join(show(item) for item in value)
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "unknown", True: "yes", False: "no"}[value]
    if name.endswith("bytes") and isinstance(value, int):
        return f"{value:,} ({value / 1e6:,.1f} MB)" if value >= 100_000 else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _layer_group(group: Mapping[str, Any]) -> str:
    reach = "see all before them" if group["window"] is None else f"see {group['window']:,} tokens back"
    return f"{group['layers']} layers that {reach}"


def _conversion(row: Mapping[str, Any]) -> str:
    error = row["relative_error"]
    loss = "loss not measured" if error is None else f"LOSES {error:.1e}" if error else "exact"
    return (f"{row['from']} to {row['to']}: {row['matrices']} matrices, {row['packed_bytes'] / 1e6:,.1f} MB, {loss}")


if __name__ == "__main__":
    sys.exit(main())
