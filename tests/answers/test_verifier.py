"""verify(): nothing that a policy writes makes it hang, crash or take memory, wherever it is called from."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.limits import HANG, is_gone
from tests.support.repository import ROOT
from troll_trl.rewards import verifier, verify
from troll_trl.rewards.verifier.pool import Pool


@pytest.fixture
def pool(monkeypatch):
    """One that this test may spoil."""
    pool = Pool()
    monkeypatch.setattr(verifier, "_pool", lambda: pool)
    yield pool
    pool.close()


COSTLY = [r"9^{9^{9^9}}", r"2^{3^4}", r"(x+1)^{99999}", "100000000!", "5!!!", r"\binom{99999}{4}", "9" * 1001]
COSTLY += ["(" * 20 + "1" + ")" * 20, r"\sum_{n=1}^{10^9}n"]


def test_what_would_take_hours_never_reaches_a_worker(pool):
    verdicts = verify(["x+1"] * len(COSTLY), [rf"\boxed{{{answer}}}" for answer in COSTLY])
    assert {verdict.decided_by for verdict in verdicts} == {"refused"} and not pool._workers
    assert verify(["2^{3^4}"], [r"\boxed{2^{3^4}}"])[0].reward == 1.0


def test_what_never_ends_is_killed_and_the_next_answer_is_right(pool, monkeypatch):
    monkeypatch.setattr(verifier, "TIMEOUT_SECONDS", 0.5)
    answers = (r"\Gamma(10^{10})", "720x", r"\Gamma(10^{11})")
    verdicts = verify([r"\Gamma(7)x"] * 3, [rf"\boxed{{{answer}}}" for answer in answers])
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0, 0.0]
    assert [verdict.decided_by for verdict in verdicts] == ["timeout", "math_verify", "timeout"]


def test_a_batch_has_a_budget_and_says_when_it_is_spent(pool, monkeypatch, caplog):
    monkeypatch.setattr(verifier, "TIMEOUT_SECONDS", 0.2)
    texts = [rf"\boxed{{\Gamma(10^{{{power}}})}}" for power in range(10, 30)]
    verdicts = verify(["x+1"] * 21, [*texts, r"\boxed{x+1}"], batch_seconds=0.8)
    counts = {path: sum(verdict.decided_by == path for verdict in verdicts) for path in ("timeout", "budget", "rules")}
    assert counts["timeout"] >= 4 and counts["budget"] >= 20 - 4 - pool.size and counts["rules"] == 1
    assert all(verdict.reward is None for verdict in verdicts if verdict.decided_by == "budget")
    assert len(caplog.messages) == 1 and f"{counts['budget']} of its 21 pairs" in caplog.messages[0]


LIMITS = """
import json, os, sys, time
from troll_trl.rewards.verifier import symbolic, worker

def answer(question):
    kind = question["answer"]
    if kind == "compute":
        while True: pass
    if kind == "allocate":
        return bool(bytearray(1 << 33))
    if kind == "die":
        os.kill(os.getpid(), 9)
    if kind == "wait":
        time.sleep(60)
    print("a library prints this")
    return True

symbolic.answer, worker.WALL_FACTOR = answer, 10
worker.serve()
"""


def test_limits_of_time_by_the_processor_and_by_the_clock_and_of_memory(pool):
    """A child that computes, hangs, allocates 8 GiB or is killed ends; the next question gets its answer."""
    worker = pool._take()
    worker.kill()
    worker.process = subprocess.Popen(
        [sys.executable, "-c", LIMITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    replies = [
        worker.ask({"gold": "", "answer": kind}, seconds=0.3)
        for kind in ("compute", "fine", "wait", "fine", "allocate", "fine", "die", "fine")
    ]
    assert [reply.get("died") for reply in replies] == ["timeout", None, "timeout", None, "crash", None, "crash", None]
    assert all(reply["right"] for reply in replies[1::2])


def test_a_lost_worker_gives_no_reward_says_so_and_is_replaced(pool, caplog):
    right = [r"\boxed{\sqrt{12}}"]
    assert verify([r"2\sqrt{3}"], right)[0].reward == 1.0
    for worker in pool._workers:
        os.killpg(worker.process.pid, signal.SIGKILL)
    lost = verify([r"2\sqrt{3}"], right)[0]
    assert (lost.reward, lost.decided_by) == (None, "worker") and "1 of 1 pairs" in caplog.text
    assert verify([r"2\sqrt{3}"], right)[0].reward == 1.0


def test_threads_share_the_workers(pool):
    ask = lambda index: verify([r"2\sqrt{3}"], [rf"\boxed{{\sqrt{{{12 + index % 2}}}}}"])[0].reward
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, range(8), timeout=HANG)) == [1.0, 0.0] * 4
    assert len(pool._workers) <= pool.size


FORKED = r"""
import os
from troll_trl.rewards import verify

ask = lambda answer: verify([r"2\sqrt{3}"], [rf"\boxed{{\sqrt{{{answer}}}}}"])[0].reward
assert ask("12") == 1.0
if (child := os.fork()) == 0:  # it has the parent's pipes, but none of its threads
    os._exit(7 if ask("13") == 0.0 and ask("{12}") == 1.0 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert ask("14") == 0.0
"""


def test_in_a_forked_process():
    subprocess.run([sys.executable, "-c", FORKED], cwd=ROOT, check=True, timeout=HANG)


BUSY = """
import threading, time
from troll_trl.rewards.verifier.pool import Pool
pool = Pool()
print(pool.ask([{"gold": "x", "answer": "2x"}], 20, 100) and pool._workers[0].process.pid, flush=True)
endless = {"gold": "x", "answer": "\\\\Gamma(10^{10})"}
threading.Thread(target=pool.ask, args=([endless], 3, 100), daemon=True).start()
time.sleep(60)
"""


def test_workers_end_when_the_trainer_is_killed():
    process = subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        worker = int(process.stdout.readline())
        children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
        time.sleep(0.5)  # it is computing
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert children
    end = time.monotonic() + HANG
    while not all(is_gone(pid) for pid in (worker, *children)):
        assert time.monotonic() < end
        time.sleep(0.05)
