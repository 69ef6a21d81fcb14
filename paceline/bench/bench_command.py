"""`paceline bench core`: what planning a step costs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..flags import plain_command, put
from ..presets import PRESETS, engine_config


def add(commands: Any) -> None:
    bench = plain_command(commands, "bench", None, "measure this engine")
    kinds = bench.add_subparsers(title="what", required=True, metavar="WHAT")
    core = plain_command(kinds, "core", _bench_core,
                         "what planning a step and taking its result in cost, without a model, by running and waiting")
    core.add_argument("--preset", default="paceline", metavar="NAME",
                      help=f"the policies to run by, one of: {', '.join(PRESETS)} (default: paceline)")
    core.add_argument("--json", action="store_true", help="print one JSON object")


def _bench_core(arguments: argparse.Namespace) -> int:
    from ..build import build_policies, build_scheduler
    from . import core_steps

    sched = engine_config(arguments.preset, {}).scheduler
    build_policies(sched)    # a wrong name is told before anything runs
    timings = [core_steps.measure(build_scheduler, sched, *size) for size in core_steps.SIZES]
    facts = core_steps.facts(timings, arguments.preset)
    put(json.dumps(facts) if arguments.json else core_steps.table(timings))
    return 0
