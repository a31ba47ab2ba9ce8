"""How the processes of a distributed test start and end."""

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

from tests.support.limits import HANG
from tests.support.repository import ROOT


def in_two_ranks(function: Callable, *args, log: Path) -> str:
    """
    Call a module's function in two ranks, as `torchrun` would, and return what they printed.

    They are children of a fork server, which imports once what each process of a launcher imports for seconds.
    """
    os.environ["PYTHONPATH"] = str(ROOT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=_rank, args=(rank, port, log, function, args)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        running = {process.sentinel: process for process in processes}
        while running and (ended := wait(running, HANG)):
            if any(running.pop(sentinel).exitcode != 0 for sentinel in ended):
                break  # the others wait for it
    finally:
        for process in processes:
            process.kill()
    return log.read_text()


def _rank(rank: int, port: int, log: Path, function: Callable, args: tuple) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on a machine with one GPU, a barrier of gloo would ask for a second
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    function(*args)
    leave_together()


def leave_together():
    """
    Exit once every rank has arrived, without the interpreter's teardown.

    PyTorch's gloo group may hang there: its destructor holds the GIL while it waits for the group's thread, and that
    thread needs the GIL to free the tensors of the last barrier. A rank that exits early may also abort, and its
    launcher then ends the others.
    """
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
