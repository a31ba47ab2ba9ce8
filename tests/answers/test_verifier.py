"""verify(): nothing that a policy writes makes it hang, crash or take memory, wherever it is called from."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from limits import HANG
from repository import ROOT

from math_answers import verify
from math_answers.rewards import verifier
from math_answers.rewards.verifier.pool import Pool

ENDLESS = r"\Gamma(10^{10})"  # neither refused nor ever finished
NEEDS_ALGEBRA = {"gold": r"2\sqrt{3}", "answer": r"\sqrt{12}"}


@pytest.fixture
def pool(monkeypatch):
    """One that this test may spoil."""
    pool = Pool()
    monkeypatch.setattr(verifier, "_pool", lambda: pool)
    yield pool
    pool.close()


def run_script(code, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition):
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


COSTLY = [
    r"9^{9^{9^9}}",
    r"2^{3^4}",
    r"(x+1)^{99999}",
    r"100000000!",
    r"5!!!",
    r"\binom{99999}{4}",
    "(" * 20 + "1" + ")" * 20,
]
COSTLY += [r"\sum_{n=1}^{10^9}n", "x^{" * 300, "9" * 1001]


def test_towers_of_powers_never_reach_a_worker(pool):
    verdicts = verify(
        ["x+1"] * len(COSTLY), [rf"\boxed{{{answer}}}" if "{" * 300 not in answer else answer for answer in COSTLY]
    )
    assert {verdict.decided_by for verdict in verdicts} <= {"refused", "no_answer"} and not pool._workers
    assert verify(["2^{3^4}"], [r"\boxed{2^{3^4}}"])[0].reward == 1.0


def test_what_never_ends_is_killed_and_the_next_answer_is_right(pool, monkeypatch):
    monkeypatch.setattr(verifier, "TIMEOUT_SECONDS", 0.5)
    verdicts = verify(
        [r"\Gamma(7)x"] * 3, [rf"\boxed{{{answer}}}" for answer in (ENDLESS, r"720x", r"\Gamma(10^{11})")]
    )
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
from math_answers.rewards.verifier import symbolic, worker

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

symbolic.answer, worker.WALL_FACTOR = answer, 2
worker.serve()
"""


def test_limits_of_time_by_the_processor_and_by_the_clock_and_of_memory(pool, monkeypatch):
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
    results = {}

    def work(index):
        results[index] = verify([r"2\sqrt{3}"] * 2, [rf"\boxed{{\sqrt{{{12 + index % 2}}}}}", "none"])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert [results[index][0].reward for index in range(8)] == [1.0, 0.0] * 4
    assert len(pool._workers) <= pool.size


def test_size_is_shared_among_the_local_ranks(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    sizes = []
    for ranks in ("", "16", "1000"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        sizes.append(Pool().size)
    assert sizes == [8, 4, 1]


def test_an_unguarded_script_is_not_run_again(tmp_path):
    """A worker that multiprocessing spawns would run the user's script again."""
    script = tmp_path / "train.py"
    script.write_text(
        "import pathlib, sys\n"
        "pathlib.Path(sys.argv[1]).open('a').write('run\\n')\n"
        "from math_answers import verify\n"
        "print([v.reward for v in verify(['2\\\\sqrt{3}'] * 2, ['\\\\boxed{\\\\sqrt{12}}', 'Answer: 1 + 1'])])\n"
    )
    done = run_script(f"exec(compile(open({str(script)!r}).read(), 'train.py', 'exec'))", str(tmp_path / "log"))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[1.0, 0.0]", "")
    assert (tmp_path / "log").read_text() == "run\n"


def test_in_a_forked_process():
    done = run_script(
        "import os\n"
        "from math_answers import verify\n"
        "ask = lambda n: verify(['2\\\\sqrt{3}'], [f'\\\\boxed{{\\\\sqrt{{{n}}}}}'])[0].reward\n"
        "assert ask(12) == 1.0\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(7 if ask(13) == 0.0 and ask('{12}') == 1.0 else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert ask(14) == 0.0\n"
    )
    assert done.returncode == 0, done.stderr


BUSY = """
import threading, time
from math_answers.rewards.verifier.pool import Pool
pool = Pool()
print(pool.ask([{"gold": "x", "answer": "2x"}], 20, 100) and pool._workers[0].process.pid, flush=True)
endless = {"gold": "x", "answer": "\\\\Gamma(10^{10})"}
threading.Thread(target=pool.ask, args=([endless], 3, 100), daemon=True).start()
time.sleep(60)
"""


def test_workers_end_when_the_trainer_is_killed():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", BUSY], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        worker = int(process.stdout.readline())
        children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
        time.sleep(0.5)  # it is computing
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert children
    wait_until(lambda: all(is_gone(pid) for pid in (worker, *children)))
