"""Wrong commands: each ends with code 2 and one line that names the key or flag, before anything is launched."""

import shlex
import subprocess
import sys

import pytest
from limits import HANG

from troll_trl.cli import main

ENOUGH = "model_name_or_path: m\ndataset_name: d\nuse_cpu: true\nbf16: false\n"

# A command, to which the test adds `--config run.yaml` if it trains, and what the line that refuses it must have
COMMANDS = {
    # Unknown and misspelt
    "gropo": ["gropo", "grpo"],
    "--hlep": ["--hlep", "help"],
    "plot a --outptu b": ["--outptu", "output"],
    "quickstart --sede 1": ["--sede", "seed"],
    "env --all": ["--all"],
    "configs shwo": ["shwo"],
    "configs show qwen3-8b/dappo": ["qwen3-8b/dappo", "qwen3-8b/dapo"],
    "configs copy eval/papr": ["eval/papr", "eval/paper"],
    "grpo --lerning_rate 1": ["--lerning_rate", "learning_rate"],
    "grpo --lerning-rate=1": ["--lerning-rate", "learning_rate"],
    "grpo --learning_rat 1": ["--learning_rat", "learning_rate"],
    "grpo --max_comp 5": ["--max_comp"],
    "grpo --kl-bond 1": ["--kl-bond", "kl_bound"],
    "grpo --conf other.yaml": ["--conf"],
    "grpo -kl_bound 1": ["-kl_bound", "kl_bound"],
    "grpo --frobnicate": ["--frobnicate"],
    "grpo --num_proceses 2 --seed 1": ["--num_proceses", "num_processes"],
    "grpo --num_processes 2 --sede 1": ["--sede", "seed"],
    "grpo stray": ["stray"],
    "grpo --num_processes 2 stray": ["stray"],
    "rloo --loss_type dapo": ["--loss_type"],
    "grpo --reward_clip_range 0": ["--reward_clip_range"],
    "grpo --algorithm rloo": ["algorithm", "rloo"],
    "eval --modle a": ["--modle", "model"],
    "eval --num_processes 2": ["--num_processes"],
    # Twice
    "grpo --seed 1 --max_steps 2 --seed 1": ["--seed", "twice"],
    "grpo --max_steps 1 --max-steps=2": ["--max_steps", "twice"],
    "grpo --num_processes 2 --num_processes 3": ["--num_processes", "twice"],
    "eval --n 1 --n 2": ["--n", "twice"],
    # A file that is missing
    "plot nowhere": ["nowhere"],
    "grpo --config": ["--config"],
    "grpo --config nowhere/run.yaml": ["nowhere/run.yaml"],
    "grpo --config folder": ["folder"],
    "grpo --config qwen3-8b/dappo": ["qwen3-8b/dappo", "qwen3-8b/dapo"],
    "grpo --config configs/qwen3-8b/mth.yaml": ["qwen3-8b/math"],
    "grpo --accelerate_config fsdp3": ["fsdp3"],
    "grpo --config_file gone.yaml": ["gone.yaml"],
    "grpo --fsdp full_shard --fsdp_config gone.json": ["gone.json"],
    "eval --config eval/papr": ["eval/papr", "eval/paper"],
    # Wrong type or value
    "quickstart --seed one": ["--seed", "one"],
    "grpo --kl_bound": ["--kl_bound"],
    "grpo --kl_bound atuo": ["kl_bound", "atuo"],
    "grpo --kl_bound -1": ["kl_bound", "-1"],
    "grpo --learning_rate 1e-6x": ["--learning_rate", "1e-6x"],
    "grpo --learning_rate 1 2": ["2"],
    "grpo --max_steps 1.5": ["--max_steps", "1.5"],
    "grpo --seed none": ["--seed", "none"],
    "grpo --method clipp": ["--method", "clipp", "clip"],
    "grpo --trust_region prjection": ["trust_region", "prjection"],
    "grpo --loss_type cispo": ["loss_type", "cispo"],
    "grpo --lr_scheduler_type constnat": ["--lr_scheduler_type", "constnat"],
    "grpo --use_vllm perhaps": ["--use_vllm", "perhaps"],
    "grpo --reward_weights 1 a": ["--reward_weights", "a"],
    "grpo --generation_kwargs {a:1}": ["--generation_kwargs", "{a:1}"],
    "grpo --generation_kwargs [1]": ["--generation_kwargs", "[1]"],
    "grpo --resume --resume_from_checkpoint x": ["resume", "resume_from_checkpoint"],
    "grpo --num_processes two": ["--num_processes", "two"],
    "grpo --num_processes 2 --max_steps many": ["--max_steps", "many"],
    "grpo --mixed_precision fp17": ["--mixed_precision", "fp17"],
    "eval": ["model"],
    "eval --model a --benchmarks b --output c --n two": ["--n", "two"],
    "eval --backend vlm": ["--backend", "vlm"],
}

# The text of a file for `troll grpo`, and what the line that refuses it must have
FILES = {
    "lerning_rate: 1": ["lerning_rate", "learning_rate"],
    "num_processes: 2": ["num_processes", "accelerate launch"],
    "accelerate_config: fsdp2": ["accelerate_config"],
    "config: other.yaml": ["config"],
    "reward_clip_range: [0, 1]": ["reward_clip_range"],
    "1: 2": ["1"],
    "seed: 1\nseed: 2": ["wrong.yaml", "seed", "twice"],
    "accelerator_config: {a: 1, a: 2}": ["`a`", "twice"],
    "learning_rate: 1e-6x": ["learning_rate", "1e-6x"],
    "learning_rate: true": ["learning_rate", "True"],
    "learning_rate:": ["learning_rate", "None"],
    "learning_rate: [1e-6]": ["learning_rate"],
    "learning_rate: {rate: 1e-6}": ["learning_rate"],
    "num_generations: 4.0": ["num_generations", "4.0"],
    "max_steps: 1e3": ["max_steps", "1e3"],
    "use_vllm: perhaps": ["use_vllm", "perhaps"],
    "reward_funcs: {a: 1}": ["reward_funcs"],
    "reward_funcs: [a, [b]]": ["reward_funcs"],
    "reward_weights: [1, a]": ["reward_weights", "a"],
    "chat_template_kwargs: enable_thinking=true": ["chat_template_kwargs"],
    "chat_template_kwargs: [1]": ["chat_template_kwargs"],
    "report_to: [{a: 1}]": ["report_to"],
    "method: clipp": ["method", "clipp"],
    "model_name_or_path: null": ["model_name_or_path"],
    "algorithm: ppo": ["algorithm", "ppo"],
    "datasets: [{path: a, pth: b}]": ["pth"],
    "datasets: [{path: a}, b]": ["datasets"],
    "env: [A]": ["wrong.yaml", "env"],
    "base: gone.yaml": ["gone.yaml"],
    "base: {a: 1}": ["wrong.yaml", "base"],
    "base: wrong.yaml": ["wrong.yaml", "base"],
    "seed: [1": ["wrong.yaml"],
    "seed:\n\t- 1": ["wrong.yaml", "line 2"],
    "seed: *nowhere": ["wrong.yaml", "nowhere"],
    "seed: 1\n---\nseed: 2": ["wrong.yaml"],
}


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """The one line that refuses a command, before anything is launched."""

    def started(*_):
        raise AssertionError("a process was started, or a model loaded")

    monkeypatch.setattr("troll_trl.cli.make_trainer.make_trainer", started)
    monkeypatch.setattr("accelerate.commands.launch.simple_launcher", started)
    monkeypatch.setattr("accelerate.commands.launch.multi_gpu_launcher", started)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "run.yaml").write_text(ENOUGH)

    def refusal(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main.main(words)
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if "error:" in line]
        assert stop.value.code == 2 and len(lines) == 1 and "Traceback" not in said, said
        return lines[0]

    return refusal


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command_is_refused_in_one_line_that_names_what_is_wrong(command, refusal):
    words = shlex.split(command)
    trains = words[0] in ("grpo", "rloo") and "--config" not in words
    said = refusal(*words, *(("--config", "run.yaml") if trains else ()))
    assert all(part in said for part in COMMANDS[command])


@pytest.mark.parametrize("text", FILES)
def test_a_wrong_file_is_refused_in_one_line_that_names_what_is_wrong(text, refusal, tmp_path):
    (tmp_path / "wrong.yaml").write_text(text)
    said = refusal("grpo", "--config", "run.yaml", "--config", "wrong.yaml")
    assert all(part in said for part in FILES[text])


def test_a_file_that_is_no_mapping_is_refused(refusal, tmp_path):
    for text in ("- seed", "", "seed"):
        (tmp_path / "wrong.yaml").write_text(text)
        assert "wrong.yaml" in refusal("grpo", "--config", "wrong.yaml")
    (tmp_path / "wrong.yaml").write_bytes("instruction: é".encode("latin-1"))
    assert "wrong.yaml" in refusal("grpo", "--config", "wrong.yaml")


@pytest.mark.parametrize("command", ["plot", "quickstart", "configs", "env"])
def test_a_command_with_few_flags_refuses_a_mistyped_one_before_anything_heavy_is_imported(command):
    """`troll quickstart --sede 1` was refused after 5 seconds, in which it imported torch."""
    code = "import sys\nfrom troll_trl.cli.main import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
    code += "    print({'torch', 'transformers', 'accelerate', 'datasets', 'pandas'} & sys.modules.keys())"
    words = [sys.executable, "-c", code, command, "--sede", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 2 and "--sede" in done.stderr and done.stdout == "set()\n"
