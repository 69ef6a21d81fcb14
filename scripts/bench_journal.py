"""What --journal costs a step. For docs/journal.md.

    python scripts/bench_journal.py [MODEL] [--rows 32] [--steps 600]

One engine decodes that many rows. In turns of five steps the journal is attached and detached, so that whatever else
the machine does meets both alike. Printed: the median step with and without it, and, which contention hardly moves, the
processor time that one step's recording took on the engine's thread, against the median step without.
"""

from __future__ import annotations

import argparse
import random
import secrets
import statistics
import tempfile
import time
from pathlib import Path

from paceline.build import assemble, load_model
from paceline.config import CacheConfig, ModelConfig, SchedulerConfig
from paceline.engine.events import StepRecord
from paceline.engine.journal import Journal
from paceline.engine.journal_file import LineFile
from paceline.engine.messages import Submit
from paceline.request import SamplingParams
from paceline.sched.plan import SchedulerOutput

TURN = 5
PROMPT_TOKENS = 64


class TimedJournal(Journal):
    """Notes the processor time of each step's recording."""

    seconds = 0.0

    def on_planned(self, plan: SchedulerOutput, now: float) -> None:
        started_at = time.thread_time()
        super().on_planned(plan, now)
        self.seconds += time.thread_time() - started_at

    def on_landed(self, step: StepRecord) -> None:
        started_at = time.thread_time()
        super().on_landed(step)
        self.seconds += time.thread_time() - started_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    loaded = load_model(ModelConfig(model=arguments.model, max_model_len=2048))
    engine = assemble(loaded, CacheConfig(num_kv_blocks=4096), SchedulerConfig(max_num_seqs=arguments.rows))
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        journal = TimedJournal(LineFile(str(path)), engine.setup, secrets.token_bytes(32))
        engine.core.events.attach_recorder(journal)
        sampling = SamplingParams(max_tokens=arguments.steps + 20, temperature=0.0, ignore_eos=True)
        for row in range(arguments.rows):
            prompt = tuple(rng.randrange(loaded.files.spec.vocab_size) for _ in range(PROMPT_TOKENS))
            engine.core.add(Submit(request_id=f"cmpl-{row:032d}", prompt_token_ids=prompt, sampling=sampling,
                                   arrival_time=0.0))
        while engine.core.step().step_num_tokens != arguments.rows:
            pass
        engine.core.events.detach(journal)
        size_before, journal.seconds = path.stat().st_size, 0.0
        times: dict[bool, list[float]] = {True: [], False: []}
        for step in range(arguments.steps):
            is_on = step // TURN % 2 == 0
            if step % TURN == 0:
                (engine.core.events.attach_recorder if is_on else engine.core.events.detach)(journal)
            started_at = time.perf_counter()
            engine.core.step()
            times[is_on].append(time.perf_counter() - started_at)
        journal.close()
        report(times, journal.seconds, path.stat().st_size - size_before)
    engine.close()


def report(times: dict[bool, list[float]], seconds: float, num_bytes: int) -> None:
    on, off, num_on = statistics.median(times[True]), statistics.median(times[False]), len(times[True])
    print(f"step without journal {1e3 * off:.3f} ms, with {1e3 * on:.3f} ms: {100 * (on / off - 1):+.2f}%")
    print(f"recording: {1e6 * seconds / num_on:.0f} us of processor time a step, "
          f"{100 * seconds / num_on / off:.2f}% of the step without; {num_bytes / num_on:.0f} bytes a step")


if __name__ == "__main__":
    main()
