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
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("Find your row")[2].splitlines()[4:12]
]
SMALL = {"quickstart", "smollm2-gsm8k-cpu"}  # "The configs for a CPU take more"
SCRIPTS = [name for name in ("train", "train_lora", "train_length") if name in OWN_SCRIPTS]
EXAMPLES = ("gsm8k_one_gpu", "vllm_server", "asynchronous", "lora")


def settings(updates: float, lora: bool, asynchronous: bool = False) -> dict[str, object]:
    """Method, rate and bound of the row for these updates per rollout batch."""
    for count, weights, rollouts, method, rate, bound in ROWS:
        first, _, last = re.match(r"any|(\d+)(?: to (\d+))?", count)[0].partition(" to ")
        holds = first == "any" or int(first) <= updates <= int(last or first)
        if holds and weights == ("LoRA" if lora else "whole model") and ("asynchronous" in rollouts) == asynchronous:
            name, _, value = bound.strip("`").partition(": ")
            return {"method": re.findall(r"`(?:\w+: )?(\w+)`", method), "rate": float(rate), name: value}
    raise LookupError(f"no row for {updates} updates")


def assert_obeys(chosen, updates: float, lora: bool, asynchronous: bool = False):
    row = settings(updates, lora, asynchronous)
    assert chosen.learning_rate == row["rate"] and [chosen.trust_region] == row["method"][:1]
    for name in ("kl_bound", "divergence_bound"):
        if name in row:
            assert str(getattr(chosen, name)) == row[name]


def test_every_case_has_one_row():
    assert [len(row) for row in ROWS] == [6] * 8 and len({tuple(row[:3]) for row in ROWS}) == 8
    for lora in (False, True):
        for updates in range(2, 33):
            assert settings(updates, lora)["method"] == ["projection"]
            assert settings(updates, lora, asynchronous=True)["method"] == ["mask", "binary_tv"]
        assert settings(1, lora)["method"] == [], "TRL's trainer"
    with pytest.raises(LookupError):
        settings(33, False)


def test_lora_takes_ten_times_the_rate():
    for updates in (1, 8, 16):
        assert settings(updates, True)["rate"] == pytest.approx(10 * settings(updates, False)["rate"])


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
        chosen.learning_rate = settings(updates, lora)["rate"]
    assert_obeys(chosen, updates, lora, asynchronous)


def test_the_commands_for_an_adapter_obey_the_table():
    found = [command for _, command in CASES if "--use_peft" in command]
    row = settings(8, lora=True)
    assert found
    for command in found:
        assert float(re.search(r"--learning_rate (\S+)", command)[1]) == row["rate"]
        assert re.search(r"--kl_bound (\S+)", command)[1] == row["kl_bound"]
