"""Work in a thread that nobody waits for, not even the end of the process, and that the end does not cut in two.

A thread that Python waits for at its end would keep a process alive for as long as a compiler takes. One that it does
not wait for is stopped wherever it happens to be, which torch's C++ answers by aborting the process. So work holds a
lock, and gives it away only while it waits for another process; the end takes the lock, and then no work goes on.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from fusegen.storage.libraries import Child

Result = TypeVar("Result")
lock = threading.Lock()
ending = False


def begun(work: Callable[[], Result], name: str) -> Future[Result]:
    """What `work` will have returned. Raises RuntimeError where no thread can be started."""
    future: Future[Result] = Future()

    def run() -> None:
        with lock:
            stop_at_the_end()
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def wait(child: Child) -> tuple[bytes, bytes]:
    """What a process that work has started says, while others may work, or this process may end."""
    lock.release()
    try:
        return child.communicate()
    finally:
        lock.acquire()
        stop_at_the_end()


def stop_at_the_end() -> None:
    if ending:
        sys.exit()  # of the thread


@atexit.register
def end() -> None:
    """From now on, no work goes on."""
    global ending
    with lock:
        ending = True


def renew() -> None:
    """A process that was forked has none of the threads, and not their lock."""
    global lock
    lock = threading.Lock()


os.register_at_fork(after_in_child=renew)
