"""verify(): nothing that a policy writes makes it hang, crash or take memory, wherever it is called from."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from limits import HANG
from repository import ROOT

from math_answers.rewards import verifier
from math_answers.rewards.verifier import DECIDERS, Verdict, close, verify
from math_answers.rewards.verifier import pool as pool_module
from math_answers.rewards.verifier.pool import WALL_FACTOR, WorkerError, WorkerPool, default_size

GAMMA = r"\Gamma(10^{10})"  # neither refused nor ever finished
NEEDS_ALGEBRA = (r"2\sqrt{3}", r"\sqrt{12}")


@pytest.fixture
def pool():
    pool = WorkerPool(size=2)
    yield pool
    pool.close()


def question(gold, answer):
    """Not strict: a gamma function for a number is then computed, not refused."""
    return {"gold": gold, "answer": answer, "strict": False}


def run_script(code, *arguments, **kwargs):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
        **kwargs,
    )


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:  # no such process; while it ends, ESRCH instead of ENOENT
        return True


def wait_until(condition, seconds=HANG):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_verdicts_and_paths():
    cases = [
        ("72", "So \\boxed{72}.", 1.0, "text"),
        ("72", "So \\boxed{72.0}.", 1.0, "number"),
        ("1, 2", "So \\boxed{2, 1}.", 1.0, "structure"),
        ("2\\sqrt{3}", "So \\boxed{\\sqrt{12}}.", 1.0, "math_verify"),
        ("72", "So \\boxed{9^{9^{9^9}}}.", 0.0, "refused"),
        ("72", "It is 72.", 0.0, "no_answer"),
        ("???", "So \\boxed{???}.", None, "unparsed"),
        ("", "It is 72.", None, "unparsed"),
    ]
    verdicts = verify([case[0] for case in cases], [case[1] for case in cases])
    assert [(verdict.reward, verdict.decided_by) for verdict in verdicts] == [case[2:] for case in cases]
    assert {verdict.decided_by for verdict in verdicts} <= set(DECIDERS)
    assert verdicts[0] == Verdict(1.0, "72", "text")


def test_a_verdict_does_not_depend_on_its_neighbours():
    pairs = [(r"2\sqrt{3}", r"\sqrt{12}"), (r"2\sqrt{3}", r"\sqrt{13}"), ("x^2-1", "(x-1)(x+1)"), ("12", "12.0")]
    alone = [verify([gold], [f"\\boxed{{{answer}}}"])[0].reward for gold, answer in pairs]
    hostile = [(r"\Gamma(7)", f"\\Gamma(10^{{{power}}})") for power in range(10, 14)]
    golds, answers = zip(*hostile, *pairs, *hostile, strict=True)
    together = verify(golds, [f"\\boxed{{{answer}}}" for answer in answers], timeout=1)
    assert [verdict.reward for verdict in together[len(hostile) : -len(hostile)]] == alone == [1.0, 0.0, 1.0, 1.0]


def test_bad_arguments():
    with pytest.raises(ValueError, match="2 gold answers but 1 texts"):
        verify(["1", "2"], ["1"])
    assert verify([], []) == []


def test_a_timeout_is_killed_and_costs_the_others_nothing(pool):
    replies = pool.ask([question("12", GAMMA), *[question(*NEEDS_ALGEBRA)] * 20], seconds=1)
    assert replies[0] == {"died": "timeout"}
    assert replies[1:] == [{"result": True}] * 20


def test_a_worker_answers_again_after_a_timeout():
    pool = WorkerPool(size=1)
    try:
        for _ in range(2):
            assert pool.ask([question("12", GAMMA)], seconds=0.3) == [{"died": "timeout"}]
            assert pool.ask([question(*NEEDS_ALGEBRA)], seconds=5) == [{"result": True}]
    finally:
        pool.close()


@pytest.mark.slow
def test_memory_is_capped():
    pool = WorkerPool(size=1, memory_bytes=400 << 20)
    try:
        # A number of 1.25 gigabytes
        assert pool.ask([question("12", "2^{9999999999}")], seconds=30) == [{"died": "memory"}]
        worker = next(iter(pool._workers))
        status = Path(f"/proc/{worker.process.pid}/limits").read_text()
        assert str(400 << 20) in next(line for line in status.splitlines() if "address space" in line)
        assert pool.ask([question(*NEEDS_ALGEBRA)], seconds=20) == [{"result": True}]
    finally:
        pool.close()


@pytest.mark.slow
def test_a_worker_that_was_killed_while_idle_is_replaced(pool):
    assert pool.ask([question(*NEEDS_ALGEBRA)], seconds=20) == [{"result": True}]
    for worker in pool._workers:
        os.kill(worker.process.pid, signal.SIGKILL)
    assert pool.ask([question(*NEEDS_ALGEBRA)] * 4, seconds=20) == [{"result": True}] * 4


@pytest.mark.slow
def test_a_worker_whose_child_was_killed_is_replaced(pool):
    assert pool.ask([question(*NEEDS_ALGEBRA)], seconds=20) == [{"result": True}]
    for worker in pool._workers:
        children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
    time.sleep(0.2)
    replies = pool.ask([question(*NEEDS_ALGEBRA), question(r"2\sqrt{3}", r"\sqrt{13}")] * 3, seconds=20)
    assert replies == [{"result": True}, {"result": False}] * 3  # and not the reply to the question before


class CrashingWorker:
    """Ends at certain questions, or at all of them."""

    def __init__(self, deadly):
        self.deadly = deadly

    def ask(self, question, seconds):
        if self.deadly is None or self.deadly in question.get("answer", ""):
            raise WorkerError("it did not reply")
        return {"result": True}

    def kill(self):
        pass


def test_only_a_crash_of_a_trivial_question_too_gives_none(monkeypatch):
    """A policy that finds an answer which kills the worker must not get out of a 0 by it."""
    completions = [rf"\boxed{{{answer}}}" for answer in (r"\sqrt{27}", r"\sqrt{13}")]
    for deadly, rewards in ((r"\sqrt{13}", [1.0, 0.0]), (None, [None, None])):
        crashing = WorkerPool(size=1)
        monkeypatch.setattr(crashing, "_take", lambda deadly=deadly: CrashingWorker(deadly))
        monkeypatch.setattr(verifier, "_pool", lambda crashing=crashing: crashing)
        verdicts = verify([r"3\sqrt{3}"] * 2, completions)
        assert [verdict.reward for verdict in verdicts] == rewards and verdicts[1].decided_by == "crash"
        crashing.close()


@pytest.mark.slow
def test_a_batch_that_is_hostile_throughout_takes_the_limit_for_each_question():
    pool, limit, count = WorkerPool(size=2), 0.2, 12
    try:
        pool.ask([question(*NEEDS_ALGEBRA)] * 2, seconds=20)  # started
        start = time.monotonic()
        replies = pool.ask([question("12", GAMMA)] * count, seconds=limit)
        elapsed = time.monotonic() - start
    finally:
        pool.close()
    assert replies == [{"died": "timeout"}] * count  # all alike: none is hurried for the sake of the others
    assert elapsed < count * limit * WALL_FACTOR  # by the clock; two workers on an idle machine take count * limit / 2


SMALL_GAMMA = r"\Gamma(7)"


def hard(count, first=10):
    """Answers that no worker finishes, all different."""
    return [rf"\boxed{{\Gamma(10^{{{power}}})}}" for power in range(first, first + count)]


@pytest.fixture
def asked(monkeypatch):
    """The questions on answers that workers get."""
    questions, own = [], WorkerPool(size=2)
    ask = own.ask

    def note_and_ask(batch, *limits):
        questions.extend(question for question in batch if "answer" in question)
        return ask(batch, *limits)

    monkeypatch.setattr(own, "ask", note_and_ask)
    monkeypatch.setattr(verifier, "_pool", lambda: own)
    monkeypatch.setattr(verifier, "_EXCEEDED", {})
    yield questions
    own.close()


def test_a_timeout_is_remembered(asked):
    """Eight hard answers took 13 seconds, and 12 again."""
    for _ in range(2):
        assert {verdict.decided_by for verdict in verify([SMALL_GAMMA] * 4, hard(4), timeout=0.2)} == {"timeout"}
    assert len(asked) == 4
    verify([SMALL_GAMMA], hard(1), timeout=0.1)  # which is no more than it had
    assert len(asked) == 4
    verify([SMALL_GAMMA], hard(1), timeout=0.3)
    verify([r"\Gamma(8)"], hard(1), timeout=0.2)
    assert len(asked) == 6


def test_what_exceeds_the_clock_alone_is_not_remembered(asked, monkeypatch):
    """The machine may have been busy or asleep."""
    reply = {"died": "timeout", "by_clock": True}
    monkeypatch.setattr(verifier, "_KNOWN_GOLDS", {SMALL_GAMMA: True})
    monkeypatch.setattr(verifier._pool(), "ask", lambda batch, *_: asked.extend(batch) or [reply] * len(batch))
    for _ in range(2):
        assert verify([SMALL_GAMMA], hard(1))[0].decided_by == "timeout"
    assert len(asked) == 2


def test_a_batch_has_a_budget_and_says_when_it_is_spent(asked, caplog):
    """The rest has no verdict: it may be right. An ordinary batch never comes near it."""
    texts = [*hard(30), rf"\boxed{{{SMALL_GAMMA}}}", r"\boxed{\frac{\Gamma(8)}{7}}"]
    verdicts = verify([SMALL_GAMMA] * len(texts), texts, timeout=0.2, batch_seconds=1)
    counts = {path: sum(verdict.decided_by == path for verdict in verdicts) for path in DECIDERS}
    assert 5 <= counts["timeout"] <= 7 and counts["budget"] == 31 - counts["timeout"]  # two workers end what they do
    assert [verdicts[30].reward, verdicts[31].reward] == [1.0, None]
    assert all(verdict.reward is None for verdict in verdicts if verdict.decided_by == "budget")
    message = f"spent the 1 s of processor time of a batch: {counts['budget']} of its {len(texts)} pairs get no verdict"
    assert len(caplog.messages) == 1 and message in caplog.messages[0]
    # The next batch has a budget of its own, and begins where this one ended
    more = verify([SMALL_GAMMA] * len(texts), texts, timeout=0.2, batch_seconds=1)
    assert sum(verdict.decided_by == "timeout" for verdict in more) > counts["timeout"]


def test_the_time_of_answers_below_the_limit_counts_too(pool):
    budget = pool_module.Budget(0.5)
    replies = pool.ask([question("2x", f"x+x+0\\cdot\\sin({number})") for number in range(2000)], 5, budget)
    assert {"died": "budget"} in replies and replies[0] == {"result": True} and budget.left <= 0


LIMIT_SCRIPT = """
import os, signal, time
from multiprocessing.connection import Pipe
from math_answers.rewards.verifier import worker

def serve(answer, seconds, wall_seconds):
    ours, theirs = Pipe()
    child = os.fork()
    if child == 0:
        ours.close()
        worker._serve(theirs, answer, 1 << 40)
    theirs.close()
    worker.send(ours, {"seconds": seconds, "wall_seconds": wall_seconds})
    ours.close()
    return worker.REASONS.get(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "answered")

def compute(question):
    while True:
        pass

def wait(question):
    time.sleep(1)
    return {}

print(serve(wait, 0.2, 60), serve(compute, 0.2, 60), serve(wait, 60, 0.2))
"""


def test_the_limit_is_processor_time_and_the_clock_only_a_bound():
    """Under load a worker waits for its processor: that must not change a verdict."""
    done = run_script(LIMIT_SCRIPT)
    assert done.stdout.split() == ["answered", "timeout", "timeout"], done.stderr


def test_start_makes_the_workers_in_the_background(monkeypatch):
    pool, allowed, start_worker = WorkerPool(size=2), threading.Event(), pool_module.Worker

    def wait_and_start(*arguments):
        allowed.wait(HANG)
        return start_worker(*arguments)

    monkeypatch.setattr(pool_module, "Worker", wait_and_start)
    try:
        pool.start()  # comes back while none may start
        assert len(pool._workers) == 0
        allowed.set()
        wait_until(lambda: len(pool._workers) == 2)
        assert pool.ask([question(*NEEDS_ALGEBRA)] * 2, seconds=20) == [{"result": True}] * 2
        assert len(pool._workers) == 2
    finally:
        pool.close()
    pool.start()  # closed: nothing to start, and nothing raised
    assert pool._workers == set()


def test_threads_share_the_pool():
    results = {}

    def work(index):
        results[index] = verify([NEEDS_ALGEBRA[0]] * 3, [f"\\boxed{{\\sqrt{{{12 + (index % 2)}}}}}", "none", ""])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert [results[index][0].reward for index in range(8)] == [1.0, 0.0] * 4
    assert len(verifier._shared._workers) <= default_size()


def test_in_async_code():
    async def main():
        direct = verify([NEEDS_ALGEBRA[0]], ["\\boxed{\\sqrt{12}}"])
        threaded = await asyncio.gather(
            *(asyncio.to_thread(verify, [NEEDS_ALGEBRA[0]], [f"\\boxed{{\\sqrt{{{n}}}}}"]) for n in (12, 13))
        )
        return [direct, *threaded]

    assert [verdicts[0].reward for verdicts in asyncio.run(main())] == [1.0, 1.0, 0.0]


def test_close_ends_the_processes_and_the_next_call_starts_new_ones():
    verify([NEEDS_ALGEBRA[0]], ["\\boxed{\\frac{\\sqrt{48}}{2}}"])
    pids = [worker.process.pid for worker in verifier._shared._workers]
    assert pids
    close()
    close()
    assert all(is_gone(pid) for pid in pids)
    assert verify([NEEDS_ALGEBRA[0]], ["\\boxed{\\frac{\\sqrt{108}}{3}}"])[0].reward == 1.0


def test_close_while_another_thread_asks():
    """It must neither hang nor raise there."""
    verdicts = []
    texts = [f"\\boxed{{\\sqrt{{{index}}}}}" for index in range(300)]
    thread = threading.Thread(target=lambda: verdicts.extend(verify([r"2\sqrt{3}"] * 300, texts)))
    thread.start()
    time.sleep(0.3)
    close()
    thread.join(HANG)
    assert [verdict.reward for verdict in verdicts] == [float(index == 12) for index in range(300)]


def test_unguarded_script_is_not_run_again(tmp_path):
    """A worker that is spawned by multiprocessing runs the user's script again, which raises without a guard."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, pathlib\n"
        "pathlib.Path(sys.argv[1]).open('a').write('run\\n')\n"
        "from math_answers.rewards.verifier import verify\n"
        "print([v.reward for v in verify(['2\\\\sqrt{3}'] * 2, ['\\\\boxed{\\\\sqrt{12}}', 'Answer: 1 + 1'])])\n"
        "import math_answers.rewards.verifier as v\n"
        "pid = next(iter(v._shared._workers)).process.pid\n"
        "maps = pathlib.Path(f'/proc/{pid}/maps').read_text()\n"
        "assert 'torch' not in maps and 'sympy' not in sys.modules and 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "log")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1.0, 0.0]"
    assert (tmp_path / "log").read_text() == "run\n"


BUSY_SCRIPT = """
import sys, threading, time
from math_answers.rewards.verifier.pool import WorkerPool
pool = WorkerPool(size=1)
pool.ask([{"gold": "12", "answer": "12"}], 20)
print(next(iter(pool._workers)).process.pid, flush=True)
endless = {"gold": "12", "answer": "\\\\Gamma(10^{10})", "strict": False}
threading.Thread(target=pool.ask, args=([endless], 3), daemon=True).start()
time.sleep(60)
"""


def test_workers_end_when_the_trainer_is_killed():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", BUSY_SCRIPT], env=environment, stdout=subprocess.PIPE, text=True)
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


def test_in_a_forked_process():
    code = (
        "import os, sys\n"
        "from math_answers.rewards.verifier import verify\n"
        "ask = lambda n: verify(['2\\\\sqrt{3}'], [f'\\\\boxed{{\\\\sqrt{{{n}}}}}'])[0].reward\n"
        "assert ask(12) == 1.0\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(7 if ask(13) == 0.0 and ask('12.0') == 1.0 else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert ask(14) == 0.0\n"
    )
    done = run_script(code)
    assert done.returncode == 0, done.stderr


def test_interpreter_that_ends_at_once_does_not_hang():
    done = run_script(
        "from math_answers.rewards.verifier import verify\nverify(['2\\\\sqrt{3}'], ['\\\\boxed{\\\\sqrt{12}}'])"
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def no_processes(monkeypatch):
    def refuse(*args, **kwargs):
        raise WorkerError("no processes here")

    close()
    verifier._warn_of_fallback.cache_clear()
    verifier._KNOWN_GOLDS.clear()
    monkeypatch.setattr("math_answers.rewards.verifier.pool.Worker", refuse)
    yield
    close()
    verifier._warn_of_fallback.cache_clear()


def test_without_processes_it_says_so_once_and_gives_none(no_processes):
    """What no worker has read is neither right nor wrong."""
    with pytest.warns(UserWarning, match="cannot be started here .no processes here") as record:
        first = verify([r"2\sqrt{3}"] * 2, [f"\\boxed{{{answer}}}" for answer in (r"\sqrt{12}", "5")])
        second = verify(["5"] * 2, [r"\boxed{5}", r"\boxed{6}"])
    assert len(record) == 1
    assert [verdict.reward for verdict in first + second] == [None, None, 1.0, 0.0]


def test_a_start_that_failed_is_not_tried_again_at_every_step(no_processes, monkeypatch):
    """It may take two minutes to fail."""
    starts = []
    monkeypatch.setattr(verifier, "_pool", lambda: starts.append(1) or WorkerPool(size=1))
    with pytest.warns(UserWarning, match="cannot be started"):
        for index in range(5):
            verify([r"2\sqrt{3}"], [f"\\boxed{{\\sqrt{{{index}}}}}"])
    assert len(starts) == 1
    monkeypatch.setattr(verifier, "_retry_at", 0.0)
    verify([r"2\sqrt{3}"], [r"\boxed{\sqrt{99}}"])
    assert len(starts) == 2


def test_only_the_first_rank_warns(no_processes, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify([r"2\sqrt{3}"], [r"\boxed{\sqrt{12}}"])[0].reward is None


def test_size_is_shared_among_the_local_ranks(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert default_size() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert default_size() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert default_size() == 1


def test_messages_survive_any_text(pool):
    texts = ["\ud800", "\x00", "é" * 500, json.dumps({"a": 1})]
    replies = pool.ask([question("x+1", text) for text in texts], seconds=20)
    assert all(reply.get("result") is False for reply in replies)
