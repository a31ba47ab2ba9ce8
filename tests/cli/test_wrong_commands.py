"""Wrong commands: each ends with code 2 and one line that names the key or flag, before anything is launched."""

import shlex

import pytest

from troll_trl.cli import main

ENOUGH = "model_name_or_path: m\ndataset_name: d\nuse_cpu: true\nbf16: false\n"

# A command, to which the test adds `--config run.yaml` if it trains, and what the line that refuses it must have
COMMANDS = {
    # Unknown and misspelt
    "gropo": ["gropo", "grpo"],
    "quickstart --sede 1": ["--sede", "seed"],
    "configs show qwen3-8b/dappo": ["qwen3-8b/dappo", "qwen3-8b/dapo"],
    "grpo --lerning-rate=1": ["--lerning-rate", "learning_rate"],
    "grpo --max_comp 5": ["--max_comp"],  # no abbreviation is taken
    "grpo --conf other.yaml": ["--conf"],
    "grpo -kl_bound 1": ["-kl_bound", "kl_bound"],
    "grpo --num_proceses 2 --seed 1": ["--num_proceses", "num_processes"],
    "grpo --num_processes 2 --sede 1": ["--sede", "seed"],
    "grpo --num_processes 2 stray": ["stray"],
    "grpo --reward_clip_range 0": ["--reward_clip_range"],  # of RLOO alone
    "grpo --algorithm rloo": ["algorithm", "rloo"],
    "eval --modle a": ["--modle", "model"],
    # Twice
    "grpo --max_steps 1 --max-steps=2": ["--max_steps", "twice"],
    "grpo --num_processes 2 --num_processes 3": ["--num_processes", "twice"],
    # A file that is missing
    "plot nowhere": ["nowhere"],
    "grpo --config nowhere/run.yaml": ["nowhere/run.yaml"],
    "grpo --config configs/qwen3-8b/mth.yaml": ["qwen3-8b/math"],
    "grpo --accelerate_config fsdp3": ["fsdp3"],
    # Wrong type or value
    "grpo --kl_bound -1": ["kl_bound", "-1"],
    **{
        f"grpo {method} --{name} {value}": [name, "at least 1", value]
        for name in ("per_device_train_batch_size", "steps_per_generation", "gradient_accumulation_steps")
        for method, value in (("--method clip", "0"), ("", "-1"))
    },
    "grpo --num_iterations 0": ["num_iterations", "at least 1", "0"],
    "grpo --num_generations 0": ["num_generations", "at least 2", "0"],
    "grpo --learning_rate -1e-5": ["learning_rate", "-1e-05"],  # argparse took it for a flag
    "grpo --learning_rate nan": ["learning_rate", "nan"],
    "grpo --method clip --learning_rate inf": ["learning_rate", "inf"],
    "grpo --dataset_name ''": ["dataset_name"],
    "grpo --deepspeed /nope.json": ["deepspeed", "/nope.json"],
    """grpo --generation_kwargs '{"top_kk": 1}'""": ["generation_kwargs", "top_kk", "top_k?"],
    "check --model /nope": ["/nope"],
    "check --dtype flaot32": ["--dtype", "flaot32", "float32"],
    "configs copy qwen3-8b/dapo --to run.yaml": ["run.yaml/qwen3-8b/dapo.yaml", "--to"],
    "grpo --kl_bound -1e-3": ["kl_bound", "-0.001"],
    "grpo --max_steps 1.5": ["--max_steps", "1.5"],
    "grpo --method clipp": ["--method", "clipp", "clip"],
    "grpo --generation_kwargs [1]": ["--generation_kwargs", "[1]"],
    "grpo --resume --resume_from_checkpoint x": ["resume", "resume_from_checkpoint"],
    "grpo --num_processes 2 --max_steps many": ["--max_steps", "many"],
    "quickstart --updates 0": ["--updates", "0"],
    "quickstart --output run.yaml": ["run.yaml", "cannot be written to"],
    "eval": ["model"],
}

# The text of a file for `troll grpo`, and what the line that refuses it must have
FILES = {
    "lerning_rate: 1": ["lerning_rate", "learning_rate"],
    "num_processes: 2": ["num_processes", "accelerate launch"],
    "seed: 1\nseed: 2": ["wrong.yaml", "seed", "twice"],
    "learning_rate: 1e-6x": ["learning_rate", "1e-6x"],
    "learning_rate: true": ["learning_rate", "True"],
    "learning_rate:": ["learning_rate", "None"],
    "system_prompt: off": ["system_prompt", "False", "quote"],
    "model_revision: 0123456": ["model_revision", "42798", "quote"],
    "run_name: 1:30": ["run_name", "90", "quote"],
    "run_name: 2026-11-28": ["run_name", "2026", "quote"],
    "report_to: no": ["report_to", "False", "quote"],
    "reward_funcs: [a.b, yes]": ["reward_funcs", "True", "quote"],
    "save_strategy: no": ["save_strategy", "False", "quote"],
    "num_generations: 4.0": ["num_generations", "4.0"],
    "reward_funcs: [a, [b]]": ["reward_funcs"],
    "reward_weights: [1, a]": ["reward_weights", "a"],
    "chat_template_kwargs: [1]": ["chat_template_kwargs"],
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
    "- seed": ["wrong.yaml"],
    "": ["wrong.yaml"],
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
