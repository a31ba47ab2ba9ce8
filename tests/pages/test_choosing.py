"""The table of docs/choosing.md, and that configs, examples and the pages' scripts and commands obey it."""

import ast
import re
from types import SimpleNamespace

import pytest
from repository import ROOT
from test_commands import CASES, OWN_SCRIPTS
from training_args import parse_training_args
from transformers import TrainingArguments

from troll_trl import TrollGRPOConfig
from troll_trl.cli.command_line import config_names

PAGE = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("| case |")[2].partition("\n\n")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()[2:]]
SMALL = {"quickstart", "smollm2-gsm8k-cpu"}  # "The configs for a CPU take more"
SCRIPTS = [name for name in ("train", "train_lora", "train_length") if name in OWN_SCRIPTS]
EXAMPLES = ("gsm8k_one_gpu", "vllm_server", "asynchronous", "lora")


def settings(updates: float, lora: bool, asynchronous: bool = False) -> dict[str, str]:
    """Trust region, bound and rate of the row for these updates per rollout batch, or for samples that are old."""
    weights = "LoRA" if lora else "whole model"
    for case, chosen, rate, _ in ROWS:
        numbers = re.match(r"(\d+) to (\d+) updates, ", case)
        fits = numbers is not None and int(numbers[1]) <= updates <= int(numbers[2])
        if asynchronous:
            fits = case.startswith("asynchronous, older")
        if fits and case.endswith(weights):
            return dict(re.findall(r"`(\w+): (\S+)`", chosen)) | {"learning_rate": rate}
    raise LookupError(f"no row for {updates} updates")


def assert_obeys(chosen, updates: float, lora: bool, asynchronous: bool = False):
    row = settings(updates, lora, asynchronous)
    assert chosen.learning_rate == float(row.pop("learning_rate"))
    assert {name: str(getattr(chosen, name)) for name in row} == row


def test_every_case_has_one_row():
    assert [len(row) for row in ROWS] == [4] * len(ROWS) and len({row[0] for row in ROWS}) == len(ROWS)
    for updates in range(2, 33):
        assert settings(updates, False)["trust_region"] == "projection"
    for lora in (False, True):
        assert settings(8, lora)["trust_region"] == "projection"
        assert settings(1, lora, asynchronous=True)["trust_region"] == "mask"
        with pytest.raises(LookupError):  # TRL's trainer
            settings(1, lora)
    with pytest.raises(LookupError):
        settings(33, False)


def test_lora_takes_ten_times_the_rate():
    rates = [float(settings(8, lora)["learning_rate"]) for lora in (True, False)]
    assert rates[0] == pytest.approx(10 * rates[1])


@pytest.mark.parametrize("name", [name for name in config_names() if not name.startswith("eval/")])
def test_a_config_obeys_the_table(name, monkeypatch):
    if name in SMALL:
        pytest.skip("a small model on a CPU")
    processes = 1 if "one-gpu" in name else 8
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: processes))
    _, args, model = parse_training_args(["--config", name, "--use_cpu", "--bf16", "false"])
    assert args.updates_per_rollout_batch == 8
    assert_obeys(args, args.updates_per_rollout_batch, model.use_peft)


def options_of(code: str, **names) -> SimpleNamespace:
    """What a script sets in its config, on eight GPUs, next to the defaults."""
    [call] = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("TrollGRPOConfig")
    ]
    wanted = {"learning_rate", "trust_region", "kl_bound", "divergence_bound", "num_iterations", "steps_per_generation"}
    wanted |= {"generation_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"}
    given = {
        word.arg: eval(compile(ast.Expression(word.value), "script", "eval"), names)
        for word in call.keywords
        if word.arg in wanted
    }
    defaults = {"learning_rate": 1e-6, "num_iterations": 1, "gradient_accumulation_steps": 1, "divergence_bound": 0.15}
    defaults |= {name: getattr(TrollGRPOConfig, name) for name in ("trust_region", "kl_bound")}
    return SimpleNamespace(**defaults | given)


@pytest.mark.parametrize("name", [*SCRIPTS, *EXAMPLES])
def test_a_script_obeys_the_table(name):
    code = OWN_SCRIPTS.get(name) or (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    chosen = options_of(code, GPUS=8)
    lora, asynchronous = "LoraConfig(" in code, "AsyncTroll" in code
    updates = 1.0
    if not asynchronous:
        accumulated = chosen.gradient_accumulation_steps
        one_pass = chosen.per_device_train_batch_size
        steps = getattr(chosen, "steps_per_generation", None) or chosen.generation_batch_size / one_pass
        updates = steps * chosen.num_iterations / accumulated
        assert updates == 8
    if "SmolLM2-135M" in code:  # which the page has by name, with its rate
        assert f"SmolLM2-135M, took {chosen.learning_rate:.0e}".replace("e-0", "e-") in " ".join(PAGE.split())
        chosen.learning_rate = float(settings(updates, lora)["learning_rate"])
    assert_obeys(chosen, updates, lora, asynchronous)


def test_the_commands_for_an_adapter_obey_the_table():
    found = [command for _, command in CASES if "--use_peft" in command]
    row = settings(8, lora=True)
    assert found
    for command in found:
        assert re.search(r"--learning_rate (\S+)", command)[1] == row["learning_rate"]
        assert re.search(r"--kl_bound (\S+)", command)[1] == row["kl_bound"]
