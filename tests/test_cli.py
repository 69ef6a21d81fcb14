"""The command line as its users meet it: exit status 0, 1 or 2, results on standard output, one line for a mistake."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from paceline import build
from paceline.cli import _parser, main
from paceline.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from paceline.model.family_table import FAMILIES
from paceline.presets import PRESETS
from tests.golden.family_cases import CASES, DIRECTORY
from tests.model import quantized, tiny

MODEL = "smollm2"
SMALL = ("--num-kv-blocks", "8")
COMMAND = (sys.executable, "-m", "paceline.cli")


def run(*argv: str, capsys: Any) -> tuple[int, str, str]:
    """Status, standard output, standard error."""
    try:
        status = main(argv)
    except SystemExit as end:    # argparse ends so
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module", autouse=True)
def one_load() -> Any:
    """Packing the weights takes most of a command's time; nothing here depends on doing it anew."""
    loaded: dict[ModelConfig, build.LoadedModel] = {}
    load_model = build.load_model
    patch = pytest.MonkeyPatch()
    patch.setattr(build, "load_model",
                  lambda config, progress=None: loaded.get(config) or loaded.setdefault(config, load_model(config)))
    yield
    patch.undo()


# ---- mistakes

MISTAKES = [
    ((), "COMMAND"),
    (("frobnicate",), "frobnicate"),
    (("info",), "MODEL"),
    (("generate", MODEL), "prompt"),
    (("info", MODEL, "--frob"), "--frob"),
    (("info", MODEL, "--max-num-s", "3"), "--max-num-s"),             # no half-written flags
    (("info", MODEL, "--num-kv-blocks", "many"), "--num-kv-blocks"),
    (("info", MODEL, "--num-kv-blocks", "0"), "num_kv_blocks must be at least 1, got 0"),
    (("info", MODEL, "--kv-memory-bytes", "10"), "holds no block"),
    (("info", MODEL, "--watermark", "nan"), "watermark"),
    (("info", MODEL, "--block-size", "17"), "[16, 32, 64]"),
    (("info", MODEL, "--dtype", "fp3"), "'f32'"),
    (("info", MODEL, "--kv-dtype", "fp3"), "'bf16'"),
    (("info", MODEL, "--isa", "mmx"), "'avx2'"),
    (("info", MODEL, "--preset", "orca"), "'vllm'"),
    (("info", MODEL, "--max-model-len", "9000"), "8192"),
    (("info", MODEL, "--regime", "x"), "'continuous'"),
    (("info", MODEL, "--ordering", "x"), "'deadline', 'fair', 'fcfs', 'longest_prefix', 'priority', 'shortest_prompt'"),
    (("info", MODEL, "--admission", "x"), "'overcommit', 'reserve', 'watermark'"),
    (("info", MODEL, "--gate", "x"), "'none', 'waiting_served'"),
    (("info", MODEL, "--watermark", "0.1", "--admission", "reserve"), "no effect with admission='reserve'"),
    (("serve", MODEL, "--tenant-weights", "a=2"), "tenant_weights has no effect with ordering='fcfs'"),
    (("serve", MODEL, "--ordering", "fair", "--tenant-weights", "a"), "tenant=weight"),
    (("info", MODEL, "--preemption", "x"), "'recompute'"),
    (("info", MODEL, "--preemption", "swap"), "preemption='swap' is not built yet; choose from ['never', 'recompute'"),
    (("info", MODEL, "--preemption", "cheapest"), "preemption='cheapest' is not built yet"),
    (("info", MODEL, "--preemption", "never"), "preemption='never' needs an admission that assures a request's blocks"),
    (("info", MODEL, "--regime=dynamic", "--batch-timeout-seconds", "61"), "batch_timeout_seconds must be at most 60"),
    (("serve", MODEL, "--regime=dynamic", "--batch-timeout-seconds", "2", "--stall-seconds", "1"), "stall_seconds"),
    (("info", "--preset", "paceline", "--quality"), "MODEL"),
    (("info", "--preset", "tgi", "--admission", "watermark"), "preemption='never' needs"),
    (("info", MODEL, "--victim", "x"), "'lowest_priority'"),
    (("info", MODEL, "--chunking", "x"), "'fixed'"),
    (("info", MODEL, "--prefix-cache", "x"), "'none'"),
    (("info", "nosuch"), "nosuch"),
    (("info", ""), "no such file"),
    (("info", "dummy:gpt-5"), "dummy:smollm2-135m"),
    (("generate", MODEL, "hi", "--max-tokens", "0"), "max_tokens"),
    (("generate", MODEL, "hi", "--temperature", "nan"), "temperature"),
    (("generate", MODEL, "hi", "--top-k", "0"), "top_k"),
    (("generate", MODEL, "hi", "--top-p", "1.5"), "top_p"),
    (("generate", MODEL, "hi", "--seed", str(1 << 63)), "seed"),
    (("generate", MODEL, "hi", "--min-p", "2"), "min_p"),
    (("generate", MODEL, "hi", "--repetition-penalty", "0"), "repetition_penalty"),
    (("generate", MODEL, "hi", "--logit-bias", "5:101"), "logit_bias"),
    (("generate", MODEL, "hi", "--logit-bias", "five:1"), "logit-bias"),
    (("generate", MODEL, "hi", "--bad-words", " "), "bad_words"),
    (("generate", MODEL, "hi", "--min-tokens", "999"), "min_tokens"),
    (("generate", MODEL, "hi", "--truncate-prompt-tokens", "0"), "truncate_prompt_tokens"),
    (("generate", MODEL, ""), "prompt"),
    (("generate", MODEL, "word " * 200, *SMALL), "128"),
    (("generate", MODEL, "hi", "--num-kv-blocks", "999999999"), "blocks fit"),
    (("serve", MODEL, "--port", "70000"), "65535"),
    (("serve", MODEL, "--transport", "pigeon"), "'process'"),
    (("serve", MODEL, "--api-key", ""), "api_key"),
    (("serve", MODEL, "--served-model-name", ","), "served_model_name"),
    (("serve", MODEL, "--host", "192.0.2.1"), "192.0.2.1"),
    (("serve", MODEL, "--prefix-cache", "x"), "'none'"),
    (("serve", "nosuch"), "nosuch"),
    (("serve", MODEL, "--journal", "/no/such/dir/file"), "there is no directory /no/such/dir"),
    (("serve", MODEL, "--journal", "tests"), "is a directory"),
    (("serve", MODEL, "--journal", ""), "journal"),
    (("generate", MODEL, "hi", "--journal-tokens"), "journal_tokens has no effect"),
    (("info", MODEL, "--journal", "x"), "--journal"),
    (("journal",), "FILE"),
    (("journal", "/no/such/file"), "/no/such/file: cannot be read: No such file"),
    (("journal", "/no/such/file", "--width", "0"), "width must be at least 1"),
    (("replay", "/no/such/file"), "/no/such/file: cannot be read: No such file"),
    (("replay", "/no/such/file", "--preset", "orca"), "/no/such/file"),
    (("bench",), "TARGET"),
    (("bench", "gpu"), "gpu"),
    (("bench", "core", "--preset", "orca"), "'vllm'"),
    (("bench", "kernels", "--rows", "1,0"), "--rows: must be whole numbers of at least 1"),
    (("bench", "kernels", "--contexts", "many"), "--contexts: must be whole numbers of at least 1"),
    (("bench", "kernels", "--passes", "0"), "passes must be at least 1"),
    (("bench", "kernels", "--dtype", "int8,int3"), "dtype"),
    (("bench", "kernels", "--path", "mmx"), "isa"),
    (("bench", "kernels", "--path", "numpy"), "numpy"),
    (("bench", "kernels", "--threads", "0"), "num_threads"),
    (("info", "--preset", "vllm", "--profile"), "MODEL is needed"),
    *((command, said) for template, said in (("/no/such.jinja", "/no/such.jinja: cannot be read: No such file"),
                                             ("tests", "tests: cannot be read: Is a directory"))
      for command in (("serve", MODEL, "--chat-template", template), ("info", MODEL, "--chat-template", template),
                      ("generate", MODEL, "hi", "--chat-template", template))),
]


@pytest.mark.parametrize(("argv", "said"), MISTAKES, ids=[" ".join(argv)[:50] or "nothing" for argv, _ in MISTAKES])
def test_a_mistake_is_told_in_one_line_with_exit_status_2(argv: tuple[str, ...], said: str, capsys) -> None:
    status, out, err = run(*argv, capsys=capsys)
    lines = [line for line in err.splitlines() if not line.startswith("paceline: the pool of")]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert said in lines[0] and lines[0].startswith("paceline")


@pytest.mark.parametrize(("name", "content", "said"), [
    ("empty", None, "config.json"), ("broken/config.json", b"{", "not valid JSON"),
    ("text.gguf", b"hello world", "magic"), ("nothing.gguf", b"", "empty"),
    ("cut.gguf", b"GGUF\x03\0\0\0", "cut.gguf")])
def test_a_path_that_is_no_model(tmp_path: Path, name: str, content: bytes | None, said: str, capsys) -> None:
    path = tmp_path / name
    if content is None:
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    model = path if content is None or path.suffix == ".gguf" else path.parent
    status, out, err = run("info", str(model), capsys=capsys)
    assert (status, out, err.count("\n")) == (2, "", 1) and said in err


@pytest.mark.parametrize(("content", "said"), [
    (b"\xff\xfe{{ x }}", "cannot be read as UTF-8 text"), (b"\n\n{% for m in %}", ", line 3: Expected an expression"),
    (b"{{ x | nothing }}", ", line 1: No filter named 'nothing'"), (b"x" * (5 << 20), "at most 1048576 characters")])
def test_a_chat_template_that_is_none(tmp_path: Path, content: bytes, said: str, capsys) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(content)
    status, out, err = run("serve", MODEL, "--chat-template", str(path), capsys=capsys)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"paceline: --chat-template {path}") and said in err


def test_a_port_in_use(capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = run("serve", MODEL, "--port", str(port), capsys=capsys)
    assert status == 2 and err == f"paceline: cannot listen on 127.0.0.1:{port}: Address already in use\n"


# ---- results

def test_generate_prints_the_text_alone(capsys) -> None:
    assert run("generate", MODEL, "What is the capital of France? Answer in one sentence.", "--chat", *SMALL,
               "--block-size", "64", capsys=capsys)[:2] == (0, "The capital of France is Paris.\n")


def test_a_chat_template_of_ones_own_is_used_instead_of_the_models(tmp_path: Path, capsys) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ bos_token }}user\n{{ messages[0].content }} Answer in one sentence.<|im_end|>\n"
                    "{{ bos_token }}assistant\n\n")     # Jinja drops one
    base = ("generate", MODEL, "--chat", "--max-tokens", "8", "--json", "--num-kv-blocks", "16")
    ours = json.loads(run(*base, "--chat-template", str(path), "What is the capital of France?", capsys=capsys)[1])
    models = json.loads(run(*base, "What is the capital of France? Answer in one sentence.", capsys=capsys)[1])
    assert ours["text"] == "The capital of France is Paris."
    assert ours["num_prompt_tokens"] < models["num_prompt_tokens"]      # the model's own adds a system prompt


def test_generate_json_is_one_object_and_repeats_with_its_seed(capsys) -> None:
    argv = ("generate", MODEL, "The sea", "--max-tokens", "6", "--temperature", "1", "--json", "--num-kv-blocks", "512")
    status, out, err = run(*argv, capsys=capsys)
    first = json.loads(out)
    assert (status, err, out.count("\n")) == (0, "", 1) and len(first["token_ids"]) <= 6
    assert json.loads(run(*argv, "--seed", str(first["seed"]), capsys=capsys)[1])["token_ids"] == first["token_ids"]


def test_a_seed_that_was_drawn_is_reported(capsys) -> None:
    argv = ("generate", MODEL, "The sea", "--max-tokens", "6", "--temperature", "1", "--num-kv-blocks", "512")
    _, text, err = run(*argv, capsys=capsys)
    reported = err.removeprefix("paceline: seed ").strip()
    assert run(*argv, "--seed", reported, capsys=capsys)[1:] == (text, "")


def test_the_sampling_flags_change_the_draw(capsys) -> None:
    base = ("generate", MODEL, "The sea", "--max-tokens", "8", "--num-kv-blocks", "512")
    drawn = (*base, "--temperature", "2", "--seed", "1")
    greedy = run(*base, capsys=capsys)[1]
    assert run(*drawn, capsys=capsys)[1] != greedy != run(*base, "--chat", capsys=capsys)[1]
    assert run(*drawn, "--top-k", "1", capsys=capsys)[1] == run(*drawn, "--top-p", "1e-6", capsys=capsys)[1] == greedy
    assert run(*drawn, "--seed", "2", capsys=capsys)[1] != run(*drawn, capsys=capsys)[1]


def test_every_sampling_flag_reaches_the_engine(capsys) -> None:
    base = ("generate", MODEL, "The capital of France is", "--max-tokens", "8", "--num-kv-blocks", "512")
    plain = run(*base, capsys=capsys)[1]
    assert "Paris" in plain
    for flags in (("--bad-words", "Paris"), ("--stop", "Par"), ("--logit-bias", "28:100"),
                  ("--repetition-penalty", "50"), ("--truncate-prompt-tokens", "1")):
        assert run(*base, *flags, capsys=capsys)[1] != plain, flags
    hot = (*base, "--temperature", "2", "--seed", "5")
    for flags in (("--min-p", "1"), ("--typical-p", "1e-9"), ("--frequency-penalty", "2"),
                  ("--presence-penalty", "-2")):
        assert run(*hot, *flags, capsys=capsys)[1] != run(*hot, capsys=capsys)[1], flags


def test_json_brings_log_probabilities_where_asked_for(capsys) -> None:
    argv = ("generate", MODEL, "The sea", "--max-tokens", "3", "--num-kv-blocks", "512", "--json")
    answer = json.loads(run(*argv, "--logprobs", "2", "--prompt-logprobs", "1", "--ignore-eos", capsys=capsys)[1])
    assert len(answer["logprobs"]) == 3 and [len(top) for top in answer["top_logprobs"]] == [2] * 3
    assert [one["token_id"] for one in answer["prompt_logprobs"]] and answer["num_prompt_tokens"] == 2
    assert json.loads(run(*argv, capsys=capsys)[1])["logprobs"] is None


def test_a_pool_smaller_than_the_context_says_so_and_runs(capsys) -> None:
    status, out, err = run("generate", MODEL, "The sea", "--max-tokens", "500", *SMALL, "--json", capsys=capsys)
    assert status == 0 and "limited to 128 tokens" in err
    answer = json.loads(out)
    assert answer["num_prompt_tokens"] + len(answer["token_ids"]) <= 128


# ---- info, and what the knobs do

def info(*flags: str, capsys: Any) -> dict[str, dict[str, Any]]:
    status, out, err = run("info", MODEL, "--json", *flags, capsys=capsys)
    assert status == 0 and out.count("\n") == 1, err
    facts: dict[str, dict[str, Any]] = json.loads(out)
    return facts


def test_info_for_people_names_what_json_has(capsys) -> None:
    facts = info(capsys=capsys)
    status, text, _ = run("info", MODEL, capsys=capsys)
    assert status == 0
    for title, section in facts.items():
        assert title in text
        for name in section:
            assert name.replace("_", " ") in text
    assert facts["memory"]["kv_pool_bytes"] == facts["memory"]["kv_blocks"] * 16 * facts["memory"]["kv_per_token_bytes"]


def test_info_counts_the_parameters_that_a_token_meets(capsys) -> None:
    golden = Path(__file__).parent / "golden" / "families" / "mixtral"
    model = json.loads(run("info", str(golden), "--json", capsys=capsys)[1])["model"]
    assert (model["family"], model["experts"], model["experts_per_token"]) == ("mixtral", 4, 2)
    idle = 2 * 2 * 3 * 64 * 32    # layers, experts of each, matrices
    assert model["parameters"] - model["active_parameters"] == idle
    text = run("info", str(golden), capsys=capsys)[1]
    assert "experts per token" in text and f"{model['active_parameters']:,}" in text
    assert "active_parameters" not in info(capsys=capsys)["model"]


def test_info_tells_what_each_type_became_and_what_that_lost(capsys) -> None:
    (q4_1, q8_0) = info(capsys=capsys)["packing"]["conversions"]
    assert (q4_1["from"], q4_1["to"], q4_1["matrices"], q4_1["relative_error"]) == ("Q4_1", "int4", 210, 0)
    assert (q8_0["from"], q8_0["to"], q8_0["matrices"], q8_0["relative_error"]) == ("Q8_0", "int8", 1, 0)
    memory = info(capsys=capsys)["memory"]
    assert q4_1["packed_bytes"] == memory["int4_weights_bytes"] and q8_0["packed_bytes"] == memory["int8_weights_bytes"]
    _, text, _ = run("info", MODEL, "--dtype", "bf16", capsys=capsys)
    assert "Q4_1 to bf16: 210 matrices, 212.3 MB, LOSES 1.7e-03" in text


def test_info_says_whether_the_pool_fits_the_memory(capsys) -> None:
    assert info(capsys=capsys)["memory"]["pool_fits_memory"] is True
    memory = info("--num-kv-blocks", "999999999", capsys=capsys)["memory"]
    assert memory["pool_fits_memory"] is False and memory["largest_pool_blocks"] < 999999999


def facts_of(model: Path, *flags: str, capsys: Any) -> tuple[str, set[str]]:
    """The family, and the forms the weights are packed in."""
    status, out, err = run("info", str(model), "--json", "--num-kv-blocks", "8", *flags, capsys=capsys)
    assert status == 0, err
    facts = json.loads(out)
    suffix = "_weights_bytes"
    return facts["model"]["family"], {name.removesuffix(suffix) for name in facts["memory"] if name.endswith(suffix)}


@pytest.mark.parametrize("name", CASES)
def test_info_names_the_family_and_the_packed_forms(name: str, capsys) -> None:
    family = next(one for one in FAMILIES.values() if one.hf_architecture == CASES[name][0])
    of_routers = {"f32"} if family.has_experts else set()
    assert facts_of(DIRECTORY / name, capsys=capsys) == (family.name, {"bf16"} | of_routers)
    assert facts_of(DIRECTORY / name, "--dtype", "int8", capsys=capsys) == (family.name, {"int8"} | of_routers)


def test_info_names_every_form_of_a_file_that_mixes_them(tmp_path: Path, capsys) -> None:
    config, arrays, _ = quantized.four_bit_checkpoint("awq")
    awq = tiny.write_hf(tmp_path / "awq", config, arrays)
    assert facts_of(awq, capsys=capsys) == ("llama", {"int4", "f32"})        # its embedding is F32
    assert facts_of(tiny.write_gguf(tmp_path / "q8.gguf", quantization="Q8_0"), capsys=capsys) == ("llama", {"int8"})


EFFECTS = [    # flag, value, and where info shows it
    ("--dtype", "bf16", "memory.bf16_weights_bytes"),
    ("--kv-dtype", "f32", "memory.kv_per_token_bytes"),
    ("--max-model-len", "100", "memory.longest_request_tokens"),
    ("--num-threads", "3", "processor.threads"),
    ("--isa", "portable", "processor.path"),
    ("--num-threads=2 --run-ahead", "off", "processor.run_ahead"),
    ("--block-size", "64", "memory.kv_block_tokens"),
    ("--num-kv-blocks", "9", "memory.kv_blocks"),
    ("--kv-memory-bytes", "10000000", "memory.kv_blocks"),
    ("--prefix-cache", "none", "schedule.prefix_cache"),
    ("--kv-pages", "late", "memory.kv_pages"),
    ("--max-num-seqs", "3", "schedule.max_num_seqs"),
    ("--max-num-batched-tokens", "31", "schedule.max_num_batched_tokens"),
    ("--watermark", "0.2", "schedule.watermark"),
    ("--ordering", "priority", "schedule.ordering"),
    ("--admission", "reserve", "schedule.admission"),
    ("--gate", "waiting_served", "schedule.gate"),
    ("--max-batch-prefill-tokens", "100", "schedule.max_batch_prefill_tokens"),
    ("--ordering=priority --priority-aging-seconds", "9", "schedule.priority_aging_seconds"),
    ("--ordering=longest_prefix --aging-tokens-per-second", "9", "schedule.aging_tokens_per_second"),
    ("--ordering=fair --tenant-weights", "a=2", "schedule.tenant_weights"),
    ("--ordering=fair --fair-input-weight", "9", "schedule.fair_input_weight"),
    ("--ordering=fair --fair-output-weight", "9", "schedule.fair_output_weight"),
    ("--admission=overcommit --overcommit-quantile", "0.5", "schedule.overcommit_quantile"),
    ("--gate=waiting_served --waiting-served-ratio", "0.5", "schedule.waiting_served_ratio"),
    ("--gate=waiting_served --max-waiting-tokens", "9", "schedule.max_waiting_tokens"),
    ("--victim", "lowest_priority", "schedule.victim"),
    ("--regime", "static", "schedule.regime"),
    ("--regime=dynamic --batch-timeout-seconds", "2", "schedule.batch_timeout_seconds"),
    ("--preemption", "recompute_tail", "schedule.preemption"),
    ("--chunking", "whole", "schedule.chunking"),
    ("--chunking=itl_bounded --itl-target-ms", "9", "schedule.itl_target_ms"),
    ("--preset", "vllm", "schedule.max_num_seqs"),
]


@pytest.mark.parametrize(("flag", "value", "place"), EFFECTS)
def test_a_flag_changes_what_info_tells(flag: str, value: str, place: str, capsys) -> None:
    section, name = place.split(".")
    *policy, flag = flag.split()    # some knobs count only under one
    assert info(*policy, flag, value, capsys=capsys)[section].get(name) != info(capsys=capsys)[section].get(name)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_told_without_a_model(name: str, capsys) -> None:
    status, out, _ = run("info", "--preset", name, "--json", capsys=capsys)
    told = json.loads(out)
    preset = PRESETS[name]
    assert status == 0 and told["preset"]["source"] == preset.source
    assert told["rows"].items() >= {**preset.scheduler, **preset.cache}.items()
    status, out, _ = run("info", "--preset", name, "--max-num-seqs", "5", capsys=capsys)
    assert status == 0 and preset.source in out and re.search(r"max num seqs +5\n", out)


TESTED_ELSEWHERE = {"revision", "chat_template"}    # tests/model/test_hub.py; above


def test_every_engine_knob_has_an_effect_that_is_tested() -> None:
    knobs = {declared.name for group in (ModelConfig, CacheConfig, SchedulerConfig) for declared in fields(group)
             if declared.metadata["flag"]}
    tested = {flag.split()[-1][2:].replace("-", "_") for flag, _, _ in EFFECTS} - {"preset"} | TESTED_ELSEWHERE
    assert knobs == tested


def test_help_names_every_policy_there_is(capsys) -> None:
    tables = {"regime": build.REGIMES, "gate": build.GATES, "ordering": build.ORDERINGS, "admission": build.ADMISSIONS,
              "preemption": build.PREEMPTIONS, "victim": build.VICTIM_RULES, "chunking": build.CHUNKINGS}
    for declared in fields(SchedulerConfig):
        for name in tables.get(declared.name, ()):
            assert name in declared.metadata["help"], f"--{declared.name} does not say that {name} exists"
    assert min(map(len, tables.values())) > 1, "a table of one entry is no choice"
    for command in ("serve", "generate", "info", "replay"):
        status, out, _ = run(command, "--help", capsys=capsys)
        assert status == 0 and "--preset" in out
    commands = {"serve", "generate", "info", "journal", "replay", "bench", "bench kernels", "compare", "reproduce"}
    assert commands == set(_parser()._subparsers._group_actions[0].choices)    # type: ignore


def test_the_servers_knobs_are_its_own(capsys) -> None:
    for declared in fields(ServerConfig):
        flag = "--" + declared.name.replace("_", "-")
        assert run("info", MODEL, flag, "1", capsys=capsys)[0] == 2, f"{flag} means nothing to info"


# ---- as processes

def test_a_reader_that_has_gone_is_one_line_and_status_1() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run([*COMMAND, "info", MODEL], stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (1, "paceline: the result cannot be written: Broken pipe\n")


def test_ctrl_c_ends_generate_without_a_traceback(ctrl_c_interrupts: None) -> None:
    argv = [*COMMAND, "generate", MODEL, "Once upon a time", "--max-tokens", "8000", "--num-threads", "12"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while len(os.listdir(f"/proc/{process.pid}/task")) < 12:    # until the kernels' threads are there
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "") and "Traceback" not in err


def test_a_pool_too_large_ends_serve_with_one_line_and_status_2() -> None:
    for transport in ("thread", "process"):
        argv = [*COMMAND, "serve", MODEL, "--port", "0", "--num-kv-blocks", "999999999", "--transport", transport]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        listening, refusal = ended.stderr.splitlines()
        assert ended.returncode == 2 and listening.startswith("paceline: listening") and "blocks fit" in refusal
