"""Wrong commands: each ends with code 2 and one line that names the mistake, before anything starts."""

import shlex
import warnings

import pytest

from troll_trl.cli import main, train

ENOUGH = "model_name_or_path: m\ndataset_name: d\nuse_cpu: true\nbf16: false\n"

# A command, to which the test adds `--config run.yaml` if it trains, and a part of the line that refuses it
COMMANDS = {
    # Commands and their own flags
    "gropo": "invalid choice: 'gropo' (choose from ",
    "GRPO": "The nearest is grpo.",
    "--hlep": "unknown flag --hlep. The nearest valid name is --help.",
    "report a --outptu b": "unknown flag --outptu. The nearest valid name is --output.",
    "report": "the following arguments are required: RUN, --output",
    "report nowhere --output b": "nowhere is not a run",
    "quickstart --sede 1": "unknown flag --sede. The nearest valid name is --seed.",
    "quickstart --seed one": "argument --seed: invalid int value: 'one'",
    "configs shwo": "invalid choice: 'shwo' (choose from 'show', 'copy'). The nearest is show.",
    "configs show": "no config is named",
    "configs show qwen3-8b/dappo": "the name qwen3-8b/dappo. The nearest is qwen3-8b/dapo.",
    "configs copy eval/papr": "the name eval/papr. The nearest is eval/paper.",
    # Names of flags
    "grpo --lerning_rate 1": "unknown flag --lerning_rate. The nearest valid name is --learning_rate.",
    "grpo --learning_rat 1": "unknown flag --learning_rat. The nearest valid name is --learning_rate.",
    "grpo --KL_BOUND 1": "unknown flag --KL_BOUND. The nearest valid name is --kl_bound.",
    "grpo --conf other.yaml": "unknown flag --conf. The nearest valid name is --config.",
    "grpo --no_use_vllm": "unknown flag --no_use_vllm. The nearest valid name is --use_vllm.",
    "grpo --torch-dtype=float32": "unknown flag --torch-dtype. Write `dtype`.",
    "grpo -kl_bound 1": "unknown flag -kl_bound. The nearest valid name is --kl_bound.",
    "grpo --frobnicate": "unknown flag --frobnicate. No valid name is near it.",
    "grpo --reward_clip_range 0 1": "--reward_clip_range. It is an option of rloo",
    "rloo --trust_region mask": "`trust_region` 'mask' is an option of GRPO alone: a mask decides token by token",
    "rloo --loss_type dapo": "--loss_type. It is an option of grpo: set `algorithm: grpo`, or remove it.",
    "grpo --algorithm rloo": "`algorithm` is rloo, but this is `troll grpo`",
    # Values of flags
    "grpo --kl_bound atuo": "--kl_bound/--kl-bound: invalid number or 'auto' value: 'atuo'",
    "grpo --kl_bound": "--kl_bound/--kl-bound: expected one argument",
    "grpo --kl_bound -1": "`kl_bound` must be positive or 'auto', got -1.0",
    "grpo --learning_rate 1e-6x": "--learning_rate/--learning-rate: invalid float value: '1e-6x'",
    "grpo --learning_rate 1 2": "unrecognized arguments: 2",
    "grpo --max_steps 1.5": "--max_steps/--max-steps: invalid int value: '1.5'",
    "grpo --max_train_samples 0": "`max_train_samples` must be a whole number of at least 1, got 0",
    "grpo --method clipp": "--method: invalid choice: 'clipp' (choose from 'troll', 'clip'). The nearest is clip.",
    "grpo --trust_region prjection": "`trust_region` must be ",
    "grpo --trust_region my.Region": "`trust_region` names 'my.Region', which gives no trust region: ",
    "grpo --loss_type bnppo": "--loss_type/--loss-type: invalid choice: 'bnppo'",
    "grpo --lr_scheduler_type constnat": "'greedy'). The nearest is constant.",
    "grpo --method clip --vllm_mode colocated": "invalid choice: 'colocated' (choose from 'server', 'colocate')",
    "grpo --use_vllm perhaps": "--use_vllm/--use-vllm: Truthy value expected: got perhaps",
    "grpo --reward_weights 1 a": "--reward_weights/--reward-weights: invalid float value: 'a'",
    "grpo --generation_kwargs [1]": "invalid JSON mapping value: '[1]'",
    "grpo --fsdp full_shard --fsdp_config nofile.json": "No such file or directory: 'nofile.json'",
    "rloo --reward_clip_range 1": "--reward_clip_range/--reward-clip-range: expected 2 arguments",
    "grpo stray": "unrecognized arguments: stray",
    # Values that do not go together
    "grpo --resume --resume_from_checkpoint true": "`resume` and `resume_from_checkpoint` are both set",
    "grpo --eval_on_start": "`eval_on_start` needs an `eval_strategy`",
    "grpo --generation_batch_size 12": "generation_batch_size (12) must be divisible",
    "grpo --test_split_size 0.1": "`test_split_size` and `streaming` are for a mixture, under `datasets`",
    # Flags of the launcher, alone and next to ours
    "grpo --num_processes two": "--num_processes/--num-processes: invalid int value: 'two'",
    "grpo --num_processes -3": "`num_processes` must be at least 1, got -3",
    "grpo --num_proceses 2 --seed 1": "unknown flag --num_proceses. The nearest valid name is --num_processes.",
    "grpo --num_processes 2 --sede 1": "unknown flag --sede. The nearest valid name is --seed.",
    "grpo --mixed_precision fp17": "--mixed_precision/--mixed-precision: invalid choice: 'fp17'",
    "grpo --accelerate_config list.yaml": "list.yaml must map names to values",
    "grpo --config_file gone.yaml": "'gone.yaml' is neither a file nor one of ddp",
    "grpo --config_file fsdp3": "--config_file: 'fsdp3' is neither a file nor one of ddp",
    "grpo --config_file run.yaml --accelerate_config ddp": "`config_file` and `accelerate_config` are both set",
    # What `--config` names
    "grpo --config": "argument --config: expected one argument",
    "grpo --config ''": "'' is a folder",
    "grpo --config folder": "folder is a folder, and no config that comes with the package has this name.",
    "grpo --config nowhere/run.yaml": "There is no file nowhere/run.yaml, and no config",
    "grpo --config qwen3-8b/dappo": "qwen3-8b/dappo, and no config that comes with the package has this name. "
    "The nearest is qwen3-8b/dapo. `troll configs` lists all.",
    "rloo --config quickstart": "`loss_type`. It is an option of grpo: set `algorithm: grpo`, or remove it. To change "
    "a config that comes with the package: troll configs copy quickstart",
    "grpo --config latin.yaml": "latin.yaml cannot be read: 'utf-8' codec can't decode",
    # Evaluation
    "eval": "Nothing to do",
    "eval --modle a": "unknown flag --modle. The nearest valid name is --model.",
    "eval --model a --benchmarks b --output c --n two": "argument --n: invalid int value: 'two'",
    "eval --backend vlm": "argument --backend: invalid choice: 'vlm'",
    "eval --num_generations 4": "unknown flag --num_generations. Write `n`.",
}

# The text of a file for `troll grpo`, and a part of the line that refuses it
FILES = {
    # Names
    "max_prompt_length: 512": "wrong.yaml: unknown key `max_prompt_length`. Write `max_prompt_tokens`",
    "reward_clip_range: [0, 1]": "unknown key `reward_clip_range`. It is an option of rloo",
    "config: other.yaml": "unknown key `config`",
    "1: 2": "wrong.yaml: unknown key `1`",
    # Values
    "learning_rate: 1e-6x": "wrong.yaml: argument --learning_rate/--learning-rate: invalid float value: '1e-6x'",
    "learning_rate:": "`learning_rate` must be float, got None",
    "learning_rate: [1e-6]": "wrong.yaml: `learning_rate` must be float, got ['1e-6']",
    "max_steps: 1e3": "wrong.yaml: argument --max_steps/--max-steps: invalid int value: '1e3'",
    "use_vllm: perhaps": "wrong.yaml: argument --use_vllm/--use-vllm: Truthy value",
    "kl_bound: null": "`kl_bound` must be positive or 'auto', got None",
    "reward_funcs: null": "wrong.yaml: `reward_funcs` must be list[str], got None",
    "reward_funcs: {a: 1}": "`reward_funcs` must be list[str], got {'a': 1}",
    "reward_funcs: [a, [b]]": "`reward_funcs` must be list[str], got ['a', ['b']]",
    "reward_funcs: [a, --seed, 5]": "`reward_funcs` must be list[str], got ['a', '--seed', '5']",
    "report_to: [{a: 1}]": "`report_to` must be None | str | list[str], got [{'a': 1}]",
    "chat_template_kwargs: [1]": "`chat_template_kwargs` must be dict | str | None, got ['1']",
    "eval_strategy: off": "invalid choice: 'off' (choose from",
    "lr_scheduler_type: constnat": "The nearest is constant.",
    "model_name_or_path: null": "`model_name_or_path` must be set",
    "algorithm: ppo": "`algorithm` is ppo, but this is `troll grpo`",
    # Below a mapping, where the text of a boolean would count as true
    "accelerator_config: {gradient_accumulation_kwargs: {adjust_scheduler: off}}": "`adjust_scheduler` is off. Write",
    "datasets: [{path: a, data_files: {b: Yes}}]": "wrong.yaml: `b` is Yes. Write true or false, or quotes",
    # A mixture
    "datasets: [{name: a}]": "missing 1 required positional argument: 'path'",
    "datasets: [{path: a, pth: b}]": "unexpected keyword argument 'pth'",
    "datasets: [{path: a}, b]": "`datasets` must be list[trl.scripts.utils.DatasetConfig]",
    "streaming: true": "`test_split_size` and `streaming` are for a mixture",
    # The launcher
    "num_processes: [2]": "wrong.yaml: `num_processes` must be one value, got ['2']",
    "multi_gpu: perhaps": "`multi_gpu` must be true or false, got 'perhaps'",
    # What is no mapping of names to values
    "env: [A]": "wrong.yaml: `env` must map names to values.",
    "env: {A: null, B: [1]}": "wrong.yaml: `env` must map names to values, and `A`, `B` has no single one",
    "base: gone.yaml": "There is no file gone.yaml, the `base` of",
    "base: {a: 1}": "wrong.yaml: `base` must be a path or a list of paths",
    "base: wrong.yaml": "wrong.yaml is its own `base`: wrong.yaml -> wrong.yaml",
    "seed: 1\nseed: 2": "the key `seed` occurs twice",
    "accelerator_config: {a: 1, a: 2}": "the key `a` occurs twice",
    "seed: [1": "wrong.yaml cannot be read: line 1, column 9, at the key `seed`: expected ','",
    "- seed": "wrong.yaml must map names to values (`name: value`)",
    "": "wrong.yaml must map names to values (`name: value`)",
    "seed: 1\n---\nseed: 2": "wrong.yaml cannot be read: line 2, column 1: expected a single document",
    "? [a]\n: 1": "wrong.yaml cannot be read",
    "seed: &a [*a]": "wrong.yaml: a value nests too deep, or holds itself",
    f"seed: {'[' * 600}": "wrong.yaml: a value nests too deep",
}


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """The one line that refuses a command, before anything starts."""

    def started(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr("accelerate.commands.launch.launch_command", started)
    monkeypatch.setattr("troll_trl.cli.make_trainer.make_trainer", started)
    monkeypatch.setattr(train, "_one_process_is_enough", lambda: True)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which the command replaces
    for name in ("TROLL_LAUNCHED", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):  # which it sets
        monkeypatch.setenv(name, "")
    (tmp_path / "run.yaml").write_text(ENOUGH)
    (tmp_path / "list.yaml").write_text("- seed")
    (tmp_path / "latin.yaml").write_bytes("run_name: schön".encode("latin-1"))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)

    def refusal(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            main.main(words)
        shown = capsys.readouterr()
        assert stop.value.code == 2 and shown.out == ""
        program = " ".join(["troll", *words[:1]]) if words[0] in main.COMMANDS else "troll"
        assert shown.err.startswith(f"{program}: error: ") and shown.err.count("\n") == 1
        return shown.err

    return refusal


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command_ends_with_one_line(command, refusal):
    words = shlex.split(command)
    if words[0] in ("grpo", "rloo") and command != "grpo --config":
        words[1:1] = ["--config", "run.yaml"]
    assert COMMANDS[command] in refusal(*words)


@pytest.mark.parametrize("text", FILES, ids=lambda text: text[:80])
def test_a_wrong_file_ends_with_one_line(text, refusal, tmp_path):
    (tmp_path / "wrong.yaml").write_text(text)
    assert FILES[text] in refusal("grpo", "--config", "run.yaml", "--config", "wrong.yaml")


def test_all_unknown_names_are_told_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text("lerning_rate: 1\nmax_prompt_length: 512\nnothing_like_it: 3")
    with pytest.raises(SystemExit):
        main.main(["grpo", "--config", "wrong.yaml", "--kl_bond", "1", "--torch-dtype=auto"])
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("error: 5 names are unknown:") and len(said) == 6
    assert said[1].endswith("wrong.yaml: unknown key `lerning_rate`. The nearest valid name is learning_rate.")
    assert said[5].endswith("unknown flag --torch-dtype. Write `dtype`.")


def test_of_several_processes_one_says_the_mistake(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as stop:
        train.main(["--num_processes", "2"], "train.py")
    assert stop.value.code == 2 and capsys.readouterr().err == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        train.main(["--num_processes", "2"], "train.py")
    assert "unknown flag --num_processes. It belongs to the launcher" in capsys.readouterr().err
