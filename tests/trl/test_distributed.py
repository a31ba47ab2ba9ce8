"""Two processes on the CPU against one, on the same global batch: the same weights, the same metrics on every rank."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from trl.trainer import grpo_trainer

from tests.support import stored_rollouts
from tests.support.limits import HANG
from tests.support.ranks import in_two_ranks
from tests.support.repository import ROOT
from tests.support.stored_rollouts import CASES, OWN, SHIPPED, StaleEngine, main, shipped_model
from tests.tiny import tiny_model
from tests.trl_comparison import COSTS
from troll_trl.trainers import troll_trainer

QUICK = ["dapo", "rloo", "masked_rank", "mask", "engine", "adaptive", "equal"]
COMPARED = {"loss", "grad_norm", "reward", "num_tokens", "learning_rate"}
COMPARED |= {f"troll/{acts}_fraction" for acts in ("projected", "masked", "penalized")}
ZERO3 = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    **{"gradient_clipping": "auto", "zero_force_ds_cpu_optimizer": False},
    # So small a model would not be partitioned
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0},
}


def launch(config, folder, cases, script=stored_rollouts.__file__, **environment):
    """Run a script under `accelerate`, configured by a file, and return what it said."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*command, "--main_process_port", "0", script, str(folder), *cases],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=HANG)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as replaced:  # by the script, too
        replaced.setattr(grpo_trainer, "VLLMGeneration", StaleEngine)
        replaced.setattr(troll_trainer, "check_vllm", lambda args: None)
        main(out, [*CASES])
    return out


def result(out, case, rank, said):
    file = out / f"{case}-rank{rank}.json"
    assert file.exists(), said[-5000:]
    return json.loads(file.read_text())


def assert_equal_to_one_process(one_process, out, cases, kind, said):
    """Weights within 1e-3 of the largest movement, of which Adam makes most: it turns the rounding of gradients near 0
    into whole steps."""
    for case in cases:
        ranks = [result(out, case, rank, said) for rank in range(2)]
        assert [(rank["kind"], rank["processes"]) for rank in ranks] == [(f"DistributedType.{kind}", 2)] * 2
        lines = [[comparable(line) for line in rank["log"]] for rank in ranks]
        assert lines[0] == lines[1], f"{case}: ranks report other metrics"
        for line, single in zip(lines[0], result(one_process, case, 0, "")["log"], strict=True):
            assert line.keys() == comparable(single).keys()
            for key in line.keys() & COMPARED:
                assert line[key] == pytest.approx(single[key], rel=1e-3, abs=1e-6), (case, key)
        weights, single = torch.load(out / f"{case}.pt"), torch.load(one_process / f"{case}.pt")
        start = (shipped_model() if case in SHIPPED else tiny_model()).state_dict()
        movement = max((single[name] - start[name]).abs().max().item() for name in single)
        difference = max((weights[name] - single[name]).abs().max().item() for name in single)
        assert movement > 0.01 and difference <= 1e-3 * movement, (case, movement, difference)


def comparable(line):
    return {key: value for key, value in line.items() if not key.endswith(COSTS)}


def test_the_trust_region_acts_in_the_single_process(one_process):
    factors = [line.get("troll/rate_factor") for line in result(one_process, "adaptive", 0, "")["log"]]
    assert 0.5 in factors
    for case in OWN:
        name = f"troll/{ {'mask': 'masked', 'penalty': 'penalized'}.get(case, 'projected') }_fraction"
        outside = [line[name] for line in result(one_process, case, 0, "")["log"] if "loss" in line]
        assert (max(outside) > 0.1) == (case != "idle"), case


@pytest.mark.parametrize("cases", [QUICK, pytest.param([*OWN.keys() - {*QUICK}], marks=pytest.mark.slow)])
def test_ddp(one_process, cases, tmp_path):
    said = in_two_ranks(main, tmp_path, cases, log=tmp_path / "log.txt")
    assert_equal_to_one_process(one_process, tmp_path, cases, "MULTI_CPU", said)


def launch_fsdp2(folder, precision, cases, **script):
    shipped = yaml.safe_load((ROOT / "configs/accelerate/fsdp2.yaml").read_text())
    (folder / "fsdp2.yaml").write_text(yaml.safe_dump(shipped | {"num_processes": 2, "mixed_precision": precision}))
    return launch(folder / "fsdp2.yaml", folder, cases, **script, ACCELERATE_USE_CPU="true", FORCE_FSDP="1")


@pytest.mark.slow
def test_fsdp2(one_process, tmp_path):
    """A forward without gradient left the head whole: the weights for vLLM's next generation could not be read."""
    said = launch_fsdp2(tmp_path, "no", CASES)
    assert_equal_to_one_process(one_process, tmp_path, CASES, "FSDP", said)


@pytest.mark.slow
def test_fsdp2_in_bfloat16_projects_float32_log_probabilities(tmp_path):
    """FSDP2 casts what a model returns to the dtype of its parameters, unless told not to; the loss refuses that."""
    said = launch_fsdp2(tmp_path, "bf16", ["dapo"])
    first, *others = [line for line in result(tmp_path, "dapo", 0, said)["log"] if "loss" in line]
    assert first["troll/policy_kl_max"] < 1e-6, "at equal weights"
    assert max(line["troll/projected_fraction"] for line in others) > 0.1


@pytest.mark.extras
def test_zero3(one_process, tmp_path):
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    deepspeed = {"deepspeed_config_file": str(tmp_path / "zero3.json"), "zero3_init_flag": False}
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed}
    config |= {"num_machines": 1, "num_processes": 2, "use_cpu": False}
    (tmp_path / "zero3.yaml").write_text(yaml.safe_dump(config))
    cases = [case for case in OWN if case != "adaptive"]  # DeepSpeed has a scheduler of its own
    said = launch(tmp_path / "zero3.yaml", tmp_path, cases, DS_ACCELERATOR="cpu")
    assert_equal_to_one_process(one_process, tmp_path, cases, "DEEPSPEED", said)
