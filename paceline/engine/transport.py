"""The two ways to reach an engine loop: a thread of this process, or a process of its own. Both carry the messages of
engine/messages.py and nothing else; which one is the default is decided by measurement (docs/log.md)."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Protocol

from ..errors import ConfigError, ModelError, RequestError
from . import heap
from .core import EngineCore
from .messages import Abort, Answered, Ask, Died, Message, News, Ready, Rejected, Stop, Stopped, Submit

LOGGER = logging.getLogger("paceline.engine")
STDERR = 2    # the descriptor: what a crash needs is there whatever became of sys.stderr
OnNews = Callable[[News], None]


class LoadedCore(Protocol):
    """A core with what its front must be told, as build.py makes it."""

    @property
    def core(self) -> EngineCore: ...

    @property
    def ready(self) -> Ready: ...

    def close(self) -> None: ...


MakeCore = Callable[[], LoadedCore]


class Transport(Protocol):
    def start(self, on_news: OnNews) -> None:
        """Begins loading. on_news is called from a thread of the transport's own: Ready first, or Died."""
        ...

    def send(self, message: Message) -> None: ...

    def join(self, timeout_seconds: float) -> bool:
        """Waits for the loop to leave; False if it had not after the timeout."""
        ...

    def kill(self) -> None:
        """Ends a loop that does not leave by itself, as far as the transport can."""
        ...

    def give_up(self) -> None:
        """The loop hangs: writes the stacks of all its threads to stderr, and ends it as far as the transport can."""
        ...


class Inbox(Protocol):
    def drain(self, wait_seconds: float | None) -> Iterator[Message]:
        """Messages that have come; waits so long for the first one, None: as long as it takes."""
        ...


class FrontGone(Exception):
    """Nobody is left to serve or to tell: the process of the front was killed."""


def run_loop(make_core: MakeCore, inbox: Inbox, publish: OnNews) -> None:
    """Loads the engine, then runs it until told to stop. Never raises: whatever goes wrong is published as Died."""
    try:
        loaded = make_core()
        try:
            publish(loaded.ready)
            _serve_messages(loaded.core, inbox, publish)
        finally:
            loaded.close()
        publish(Stopped())
    except FrontGone:
        return
    except (ConfigError, ModelError) as mistake:
        publish(Died(str(mistake), is_callers_mistake=True))
    except BaseException as failure:    # the front must hear of every end, also of KeyboardInterrupt in a child
        LOGGER.exception("the engine loop has failed")
        publish(Died(f"{type(failure).__name__}: {failure}"))


def _serve_messages(core: EngineCore, inbox: Inbox, publish: OnNews) -> None:
    is_stopping = False
    while True:
        wait_seconds = core.seconds_until_work()
        for message in inbox.drain(0.0 if wait_seconds is None and is_stopping else wait_seconds):
            match message:
                case Submit():
                    _add(core, message, publish)
                case Abort():
                    core.abort(message.request_ids)
                case Ask():
                    _answer(core, message, publish)
                case Stop(is_graceful=True):
                    is_stopping = True
                case Stop():
                    return
        if core.seconds_until_work() == 0.0:
            publish(core.step())
        elif is_stopping and not core.has_work():
            return


def _add(core: EngineCore, submit: Submit, publish: OnNews) -> None:
    try:
        core.add(submit)
    except RequestError as error:
        publish(Rejected(submit.request_id, error))


def _answer(core: EngineCore, ask: Ask, publish: OnNews) -> None:
    try:
        publish(Answered(ask.number, core.answer(ask.question)))
    except RequestError as error:
        publish(Answered(ask.number, error))


class _QueueInbox:
    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def drain(self, wait_seconds: float | None) -> Iterator[Message]:
        timeout = wait_seconds
        while True:
            try:
                message = self.messages.get(timeout is None or timeout > 0, timeout)
            except queue.Empty:
                return
            yield message
            timeout = 0.0


class ThreadTransport:
    """The loop in a daemon thread of this process."""

    def __init__(self, make_core: MakeCore) -> None:
        self._make_core = make_core
        self._inbox = _QueueInbox()
        self._thread: threading.Thread | None = None

    def start(self, on_news: OnNews) -> None:
        arguments = (self._make_core, self._inbox, on_news)
        self._thread = threading.Thread(target=run_loop, args=arguments, name="paceline-engine", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._inbox.messages.put(message)

    def join(self, timeout_seconds: float) -> bool:
        assert self._thread is not None
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def kill(self) -> None:
        """A thread cannot be ended from outside; it is a daemon and goes with the process."""

    def give_up(self) -> None:
        faulthandler.dump_traceback(STDERR, all_threads=True)


class _PipeInbox:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def drain(self, wait_seconds: float | None) -> Iterator[Message]:
        try:
            if self._connection.poll(wait_seconds):
                yield self._connection.recv()
            while self._connection.poll():
                yield self._connection.recv()
        except (EOFError, OSError) as error:
            raise FrontGone from error


def _child(make_core: MakeCore, messages: Connection, news: Connection) -> None:
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group; when to leave is the front's to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable(STDERR, all_threads=True)

    def publish(one: News) -> None:
        if isinstance(one, Ready):
            heap.settle()
        try:
            news.send(one)
        except OSError as error:
            raise FrontGone from error

    with contextlib.suppress(FrontGone):    # of telling how the loop ended
        run_loop(make_core, _PipeInbox(messages), publish)
    news.close()


class ProcessTransport:
    """The loop in a process of its own, started by spawn; make_core must be picklable."""

    def __init__(self, make_core: MakeCore) -> None:
        context = multiprocessing.get_context("spawn")
        child_messages, self._messages = context.Pipe(duplex=False)
        self._news, child_news = context.Pipe(duplex=False)
        self._child_ends = (child_messages, child_news)
        self._process = context.Process(
            target=_child, args=(make_core, child_messages, child_news), name="paceline-engine", daemon=True)
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._joining = threading.Lock()

    def start(self, on_news: OnNews) -> None:
        self._process.start()
        # At exit multiprocessing ends daemons by SIGTERM and waits; the child ignores that, so this must come before.
        Finalize(None, self.kill, exitpriority=10)
        for end in self._child_ends:
            end.close()
        threading.Thread(target=self._read, args=(on_news,), name="paceline-news", daemon=True).start()
        threading.Thread(target=self._write, name="paceline-messages", daemon=True).start()

    def send(self, message: Message) -> None:
        self._outbox.put(message)    # never blocks the event loop: a full pipe is the writer thread's to wait for

    def join(self, timeout_seconds: float) -> bool:
        # One at a time: of two threads that wait for a process one is told its status, the other nothing for a while.
        with self._joining:
            self._process.join(timeout_seconds)
            return self._process.exitcode is not None

    def kill(self) -> None:
        if self._process.exitcode is None:
            self._process.kill()

    def give_up(self) -> None:
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGABRT)    # its faulthandler writes the stacks on the way out

    def _read(self, on_news: OnNews) -> None:
        last: News | None = None
        while not isinstance(last, Died | Stopped):
            try:
                last = self._news.recv()
            except (EOFError, OSError):
                self.join(5)
                last = Died(f"the engine process ended with exit status {self._process.exitcode}")
            on_news(last)
        self._outbox.put(None)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._messages.send(message)
            except OSError:
                return    # the reader sees the process end and tells the front


TRANSPORTS: dict[str, Callable[[MakeCore], Transport]] = {"thread": ThreadTransport, "process": ProcessTransport}
