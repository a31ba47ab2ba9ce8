"""Two processes on the CPU against one, on the same global batch: the same weights, the same metrics on every rank."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
import yaml
from limits import HANG
from ranks import in_two_ranks
from repository import IMPORT_PATH, ROOT, TESTS
from stored_rollouts import CASES, StaleEngine, main, shipped_model
from tiny import tiny_model
from trl.trainer import grpo_trainer

from troll_trl.trainers import troll_trainer

SCRIPT = str(TESTS / "support" / "stored_rollouts.py")
QUICK = ["dapo", "rloo", "masked_rank", "mask", "engine"]
TIMINGS = ("step_time", "runtime", "per_second")
FSDP2 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_machines": 1,
    "num_processes": 2,
    "mixed_precision": "no",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_offload_params": False,
        "fsdp_cpu_ram_efficient_loading": False,
    },
}


ZERO3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_force_ds_cpu_optimizer": False,
    # So small a model would not be partitioned
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_model_persistence_threshold": 0,
    },
}


def launch(commands, seconds, **environment):
    """Run commands at the same time, and return what they said. None outlives its time, nor the test."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([IMPORT_PATH, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=seconds)[0])
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return "\n".join(text[-3000:] for text in said)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as replaced:  # by the script, too
        replaced.setattr(grpo_trainer, "VLLMGeneration", StaleEngine)
        replaced.setattr(troll_trainer, "check_vllm", lambda args: None)
        main(out, [*CASES])
    return {case: result(out, case, 0, "") for case in CASES}, out


def result(out, case, rank, said):
    file = out / f"{case}-rank{rank}.json"
    assert file.exists(), said
    return json.loads(file.read_text())


def assert_equal_to_one_process(one_process, out, cases, kind, said, model=None):
    """Weights within 1e-3 of the largest movement, of which Adam makes most: it turns the rounding of gradients near 0
    into whole steps."""
    expected, one = one_process
    start = {name: parameter.detach() for name, parameter in (model or tiny_model()).named_parameters()}
    for case in cases:
        ranks = [result(out, case, rank, said) for rank in range(2)]
        assert [(rank["kind"], rank["processes"]) for rank in ranks] == [(kind, 2)] * 2
        lines = [[comparable(line) for line in rank["log"]] for rank in ranks]
        assert lines[0] == lines[1], f"{case}: ranks report other metrics"
        for line, single in zip(lines[0], expected[case]["log"], strict=True):
            assert line.keys() == comparable(single).keys()
            for key in line.keys() & {
                "loss",
                "grad_norm",
                "reward",
                "troll/projected_fraction",
                "troll/masked_fraction",
                "troll/penalized_fraction",
                "num_tokens",
            }:
                assert line[key] == pytest.approx(single[key], rel=1e-3, abs=1e-6), (case, key)
        weights, single = torch.load(out / f"{case}.pt"), torch.load(one / f"{case}.pt")
        movement = max((single[name] - start[name]).abs().max().item() for name in start)
        difference = max((weights[name] - single[name]).abs().max().item() for name in start)
        assert movement > 0.01 and difference <= 1e-3 * movement, (case, movement, difference)


def comparable(line):
    return {key: value for key, value in line.items() if not any(timing in key for timing in TIMINGS)}


def test_the_trust_region_acts_in_the_single_process(one_process):
    results, _ = one_process
    acts = {"mask": "masked", "penalty": "penalized"}
    for case in CASES:
        name = f"troll/{acts.get(case.split('_')[-1], 'projected')}_fraction"
        outside = [line[name] for line in results[case]["log"] if "loss" in line]
        assert (max(outside) > 0.1) == (case != "idle"), case


@pytest.mark.parametrize("cases", [QUICK, pytest.param([*CASES.keys() - {*QUICK}], marks=pytest.mark.slow)])
def test_ddp(one_process, cases, tmp_path):
    said = in_two_ranks(main, tmp_path, cases, log=tmp_path / "log.txt")
    assert_equal_to_one_process(one_process, tmp_path, cases, "DistributedType.MULTI_CPU", said)


@pytest.mark.slow
def test_fsdp2(one_process, tmp_path):
    said = launch_fsdp2(tmp_path, "no")
    assert_equal_to_one_process(one_process, tmp_path, CASES, "DistributedType.FSDP", said)


@pytest.mark.slow
def test_fsdp2_in_bfloat16_projects_float32_log_probabilities(tmp_path):
    """FSDP2 casts what a model returns to the dtype of its parameters, unless told not to; the loss refuses that."""
    said = launch_fsdp2(tmp_path, "bf16", "dapo", "reference_kl")
    for case in ("dapo", "reference_kl"):
        first, *others = [line for line in result(tmp_path, case, 0, said)["log"] if "loss" in line]
        assert first["troll/policy_kl_max"] < 1e-6, "at equal weights"
        assert max(line["troll/projected_fraction"] for line in others) > 0.1


@pytest.mark.slow
def test_fsdp2_as_shipped(tmp_path):
    """A forward without gradient leaves the head whole: the weights for vLLM's next generation could not be read."""
    cases = ["shipped", "shipped_clip"]
    single = launch([[SCRIPT, str(tmp_path / "one"), *cases]], HANG)
    file = yaml.safe_load((ROOT / "configs/accelerate/fsdp2.yaml").read_text()) | {"num_processes": 2}
    said = launch_fsdp2(tmp_path, "no", *cases, file=file)
    one_process = {case: result(tmp_path / "one", case, 0, single) for case in cases}, tmp_path / "one"
    assert_equal_to_one_process(one_process, tmp_path, cases, "DistributedType.FSDP", said, shipped_model())


def launch_fsdp2(folder, precision, *cases, file=FSDP2):
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(file | {"mixed_precision": precision}))
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(folder / "fsdp2.yaml")]
    return launch([[*launcher, SCRIPT, str(folder), *cases]], HANG, ACCELERATE_USE_CPU="true", FORCE_FSDP="1")


@pytest.mark.extras
def test_zero3(one_process, tmp_path):
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": str(tmp_path / "zero3.json"),
            "zero3_init_flag": False,
        },
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": False,
    }
    (tmp_path / "zero3.yaml").write_text(yaml.safe_dump(config))
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "zero3.yaml")]
    said = launch([[*launcher, SCRIPT, str(tmp_path)]], HANG, DS_ACCELERATOR="cpu")
    assert_equal_to_one_process(one_process, tmp_path, CASES, "DistributedType.DEEPSPEED", said)


@pytest.mark.slow
def test_two_machines(one_process, tmp_path):
    """Two `accelerate` nodes of one process each, over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "2", "--num_processes", "2"]
    launcher += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    nodes = [[*launcher, "--machine_rank", str(i), SCRIPT, str(tmp_path), "dapo", "masked_rank"] for i in range(2)]
    said = launch(nodes, HANG)
    assert_equal_to_one_process(one_process, tmp_path, ("dapo", "masked_rank"), "DistributedType.MULTI_CPU", said)
