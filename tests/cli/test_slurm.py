"""The Slurm script, with stand-ins for Slurm and for what it starts: what is started where."""

import os
import subprocess
import sys

import pytest

from tests.support.limits import HANG
from tests.support.repository import ROOT

SCRIPT = ROOT / "configs" / "slurm" / "train.sbatch"

STAND_INS = {
    "python": f'exec "{sys.executable}" "$@"',
    "scontrol": 'printf "%s\\n" $FAKE_NODES',
    # Runs the command once for each task, as Slurm would on each node
    "srun": """
        tasks=1; where=
        while [[ $1 == --* ]]; do
            [[ $1 == --ntasks ]] && tasks=$2
            [[ $1 == --nodelist ]] && where=$2
            shift 2
        done
        for ((i = 0; i < tasks; i++)); do NODES=$where SLURM_NTASKS=$tasks SLURM_PROCID=$i "$@"; done
    """,
    # As a node's name server: each node but an unknown one has an address
    "getent": '[[ $1 == ahostsv4 && $2 != unknown ]] && echo "10.0.0.$2  STREAM $2"',
    "trl": 'echo "on $NODES: trl $*" >>"$STARTED"; sleep 1',
    # As the training does, it waits for the server, which the script ends with the training
    "accelerate": """
        until grep -q vllm-serve "$STARTED" 2>/dev/null; do sleep 0.1; done
        echo "on $NODES: accelerate $*" >>"$STARTED"
    """,
}


@pytest.fixture
def submit(tmp_path):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)

    def submit(nodes: str, *arguments: str):
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "FAKE_NODES": nodes,
            "SLURM_JOB_NODELIST": "unused",
            "SLURM_CPUS_PER_TASK": "64",
            "STARTED": str(tmp_path / "started"),
        }
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        started = tmp_path / "started"
        return done, sorted(started.read_text().splitlines()) if started.exists() else []

    return submit


@pytest.mark.slow
def test_last_node_serves_and_the_others_train(submit):
    done, started = submit("a b c", "configs/qwen3-8b/gsm8k.yaml", "--learning_rate", "2e-6")
    assert done.returncode == 0, done.stderr
    launcher = "on a,b: accelerate launch --config_file configs/accelerate/fsdp2.yaml --num_machines 2 "
    launcher += "--num_processes 16 --machine_rank {} --main_process_ip a --main_process_port 29500 scripts/train.py "
    launcher += "--vllm_mode server --vllm_server_host 10.0.0.c --vllm_server_timeout 900 "
    launcher += "--config configs/qwen3-8b/gsm8k.yaml --learning_rate 2e-6"
    server = "on c: trl vllm-serve --model Qwen/Qwen3-8B --host 10.0.0.c --tensor_parallel_size 8 "
    server += "--max_model_len 3072"
    assert started == [launcher.format(0), launcher.format(1), server]


@pytest.mark.parametrize(("nodes", "said"), [("a unknown", "no address of unknown"), ("a", "needs two or more")])
def test_nothing_starts_without_a_private_address_or_a_second_node(submit, nodes, said):
    done, started = submit(nodes, "configs/qwen3-8b/gsm8k.yaml")
    assert done.returncode == 2 and said in done.stderr and not started
