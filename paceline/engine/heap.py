"""The garbage collector of a process that serves. Its pauses are times in which no step runs and nobody gets a token.

A full collection looks at every object that is alive. Beside 1,024 running and 10,000 waiting requests it took up to
285 ms (docs/log.md), where a collection of the young takes 4. What a step makes goes by reference counts, so it is
nearly always for nothing.
"""

from __future__ import annotations

import gc

OLDEST = 1000    # collections of the middle generation before a full one; 10 by default


def settle() -> None:
    """Once everything is loaded: model, tokenizer and imports are never looked at again, and full collections are
    rare, at 1,024 running one in some 2,000 steps. The young are collected as ever: fewer and larger collections of
    them would be longer pauses. For a process of our own only, since the collector is the whole process's."""
    gc.freeze()
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, OLDEST)
