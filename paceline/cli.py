"""The command line: paceline serve | generate | info | journal | replay | bench | compare | reproduce. Flags come from
the knobs of config.py; `--json` prints one JSON object on standard output and everything else goes to standard error.
Exit status: 0 done, 1 the run failed, 2 the caller's mistake."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from .bench import bench_command, compare_command, kernels_command, reproduce_command
from .config import CacheConfig, JournalConfig, ModelConfig, SchedulerConfig, ServerConfig
from .errors import ConfigError, EngineError, ModelError, RequestError
from .flags import ENGINE_GROUPS, Parser, add_knobs, configured, declared_knob, given_knobs, ledger, plain_command, put
from .presets import PRESETS, describe_preset

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


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:2] == ["bench", "kernels"]:
        words[:2] = ["bench kernels"]
    arguments = _parser().parse_args(words)
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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="paceline", description="An LLM serving engine that owns its schedule.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = _command(commands, "serve", _serve, "serve a model over HTTP, OpenAI-compatible")
    add_knobs(serve, JournalConfig)
    add_knobs(serve, ServerConfig)
    generate = _command(commands, "generate", _generate, "complete one prompt and print it")
    add_knobs(generate, JournalConfig)
    generate.add_argument("prompt", help="the text to continue, or with --chat the user's message")
    generate.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    _add_sampling(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object")
    _add_journal_commands(commands)
    bench_command.add(commands)
    kernels_command.add(commands)
    compare_command.add(commands)
    reproduce_command.add(commands)
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
    journal = plain_command(commands, "journal", _journal, "what a journal of --journal tells: counts, waits, a chart")
    journal.add_argument("file", metavar="FILE", help="a journal that serve or generate wrote")
    journal.add_argument("--width", type=int, help="columns of the chart (default: the terminal's)")
    journal.add_argument("--rows", type=int, default=40, help="requests in the chart, by arrival (default: 40)")
    journal.add_argument("--json", action="store_true", help="print one JSON object")
    replay = plain_command(
        commands, "replay", _replay,
        "prove that a journal's arrivals and results lead to the same plans; exit status 1 and the first difference "
        "where they do not. With a preset or policy flags: what others would have planned (a counterfactual)")
    replay.add_argument("file", metavar="FILE", help="a journal that serve or generate wrote")
    replay.add_argument("--preset", metavar="NAME", help=f"other policies, one of: {', '.join(PRESETS)}")
    add_knobs(replay, SchedulerConfig)
    add_knobs(replay, CacheConfig, only=("prefix_cache", "num_kv_blocks"))
    replay.add_argument("--json", action="store_true", help="print one JSON object")


def _command(commands: Any, name: str, run: Any, help: str) -> argparse.ArgumentParser:
    command = plain_command(commands, name, run, help)
    command.add_argument("model", metavar="MODEL", nargs="?" if name == "info" else None,
                         help=declared_knob(ModelConfig, "model").metadata["help"])
    command.add_argument("--preset", default=None, metavar="NAME",
                         help=f"bundle of policies, one of: {', '.join(PRESETS)} (default: paceline)")
    for group in ENGINE_GROUPS:
        add_knobs(command, group)
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


def _serve(arguments: argparse.Namespace) -> int:
    from .build import serve

    return serve(configured(arguments), ServerConfig(**given_knobs(arguments, ServerConfig)))


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
    put(json.dumps(completion.as_dict()) if arguments.json else completion.text)
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
    put(json.dumps(facts | profile) if arguments.json else "\n\n".join([ledger(facts), *profile_table(profile)]))
    return 0


def _journal(arguments: argparse.Namespace) -> int:
    from .journals import summary

    for name in ("width", "rows"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    width = arguments.width or max(shutil.get_terminal_size((100, 24)).columns - 22, 20)
    facts, chart = summary(arguments.file, width, arguments.rows)
    if arguments.json:
        put(json.dumps(facts))
        return 0
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    put(ledger({name: section for name, section in facts.items() if section}) + "\n\n"
         + chart.text(is_unicode=is_unicode, has_colours=has_colours))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from . import journals

    knobs = given_knobs(arguments, SchedulerConfig) | given_knobs(arguments, CacheConfig)
    if arguments.preset is not None or knobs:
        facts = journals.rehearsed(arguments.file, arguments.preset, knobs)
        put(json.dumps(facts) if arguments.json else journals.table(facts))
        return 0
    seen = journals.replayed(arguments.file)
    if arguments.json:
        put(json.dumps(journals.replay_facts(seen)))
    elif seen.difference is None:
        put(f"identical: {seen.num_steps} steps of {seen.num_requests} requests, every plan, end and counter")
    else:
        put(f"first difference: {seen.difference}")
    return 0 if seen.difference is None else 1


if __name__ == "__main__":
    sys.exit(main())
