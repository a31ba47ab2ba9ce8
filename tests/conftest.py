"""How far a run of the tests is, as lines of plain text, on a terminal and in a log file alike; what makes many short
runs cheap."""

import functools
import gc
import importlib.metadata
import time

import pytest
from interpreter import round_as_a_gpu

from troll_trl.kernels.dispatch import INTERPRETED

if INTERPRETED:
    round_as_a_gpu()

# accelerate asks some 45 times in a short run whether peft and others are installed, a millisecond of the disk each
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)

INTERVAL = 30  # seconds between two lines


def pytest_collection_finish():
    """Every training begins with `gc.collect()`. A third of a short run's time went into what imports had left: from
    here on the collector skips it."""
    gc.collect()
    gc.freeze()


class Progress:
    """`tests 412/1679, 2:10 < 6:40`: finished of all, time passed and time left at the mean pace so far."""

    def __init__(self, terminal):
        self.terminal = terminal
        self.finished = 0

    def pytest_collection_finish(self, session):
        self._start(len(session.items))  # of a run in one process

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self._start(len(ids))  # of each process, which shares all of them with the others

    def _start(self, total):
        self.total = total
        self.started = self.said = time.monotonic()

    def pytest_runtest_logreport(self, report):
        if report.when != "teardown":
            return
        self.finished += 1
        now = time.monotonic()
        if now - self.said >= INTERVAL and self.finished < self.total:
            self.said = now
            passed = now - self.started
            left = passed / self.finished * (self.total - self.finished)
            if self.terminal.currentfspath:
                self.terminal.ensure_newline()
            else:
                self.terminal.write("\n")  # behind the dots of several processes
            self.terminal.write_line(f"tests {self.finished}/{self.total}, {clock(passed)} < {clock(left)}")


def clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


@pytest.hookimpl(trylast=True)  # when there is a reporter
def pytest_configure(config):
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):  # not in xdist's workers
        config.pluginmanager.register(Progress(terminal))
