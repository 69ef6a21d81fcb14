"""What tests of several packages need."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Here and in processes started from here, as in a terminal: a shell that starts the tests in the background
    has the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
