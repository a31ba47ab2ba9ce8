"""Wrong commands: each ends with code 2 and one line that names the mistake, before anything starts."""

import shlex
import warnings
from pathlib import Path

import pytest

from troll_trl.cli import main, train

ENOUGH = "model_name_or_path: m\ndataset_name: d\nuse_cpu: true\nbf16: false\n"
# Name and content of the files that commands name
FILES = {
    "key": "lerning_rate: 1",
    "near": "max_prompt_length: 512",
    "number": "learning_rate: 1e-6x",
    "whole": "max_steps: 1e3",
    "boolean_for_number": "learning_rate: true",
    "text_for_boolean": "use_vllm: perhaps",
    "list": "learning_rate: [1e-6]",
    "list_of_two": "kl_bound: [0.1, 0.2]",
    "mapping": "learning_rate: {rate: 1e-6}",
    "mapping_in_list": "reward_funcs: [{a: 1}]",
    "list_for_mapping": "generation_kwargs: [a]",
    "null": "seed: null",
    "none": "max_steps: None",
    "null_bound": "kl_bound: null",
    "null_list": "reward_funcs: null",
    "null_model": "model_name_or_path: null",
    "choice": "method: clipp",
    "algorithm": "algorithm: ppo",
    "number_as_key": "1: 2",
    "processes": "num_processes: two",
    "list_of_processes": "num_processes: [2]",
    "switch": "multi_gpu: perhaps",
    "env": "env: [A]",
    "base": "base: gone.yaml",
    "own_base": "base: own_base.yaml",
    "twice": "seed: 1\nseed: 2",
    "twice_below": "accelerator_config: {a: 1, a: 2}",
    "bracket": "seed: [1",
    "tab": "seed:\n\t- 1",
    "items": "- seed",
    "empty": "",
    "alias": "seed: *nowhere",
    "alias_of_itself": "model_init_kwargs: &a\n  b: {c: [*a]}",
    "aliases": "model_init_kwargs: {a: &a 1, b: [" + "*a," * 17 + "]}",
    "documents": "seed: 1\n---\nseed: 2",
    "unhashable": "? [a]\n: 1",
}

# A command, to which the test adds `--config run.yaml` if it trains, and a part of the line that refuses it
WRONG = {
    # Commands and their own flags
    "gropo": "invalid choice: 'gropo' (choose from ",
    "--hlep": "unknown flag --hlep. The nearest valid name is --help.",
    "report a --outptu b": "unknown flag --outptu. The nearest valid name is --output.",
    "report": "the following arguments are required: RUN, --output",
    "report nowhere --output b": "nowhere is not a run",
    "quickstart --sede 1": "unknown flag --sede. The nearest valid name is --seed.",
    "quickstart --seed one": "argument --seed: invalid int value: 'one'",
    "env --all": "unknown flag --all. No valid name is near it.",
    "configs shwo": "invalid choice: 'shwo' (choose from ",
    "configs show": "no config is named",
    "configs show qwen3-8b/dappo": "the name qwen3-8b/dappo. The nearest is qwen3-8b/dapo.",
    "configs copy eval/papr": "the name eval/papr. The nearest is eval/paper.",
    # Names of flags
    "grpo --lerning_rate 1": "unknown flag --lerning_rate. The nearest valid name is --learning_rate.",
    "grpo --lerning-rate=1": "unknown flag --lerning-rate. The nearest valid name is --learning_rate.",
    "grpo --learning_rat 1": "unknown flag --learning_rat. The nearest valid name is --learning_rate.",
    "grpo --learn 1": "unknown flag --learn. The nearest valid name is --learning_rate.",
    "grpo --max_comp 5": "unknown flag --max_comp. The nearest valid name is --max_completion_length.",
    "grpo --kl-bond 1": "unknown flag --kl-bond. The nearest valid name is --kl_bound.",
    "grpo --conf other.yaml": "unknown flag --conf. The nearest valid name is --config.",
    "grpo --no_use_vllm": "unknown flag --no_use_vllm. The nearest valid name is --use_vllm.",
    "grpo --torch_dtype float32": "unknown flag --torch_dtype. Write `dtype`.",
    "grpo -kl_bound 1": "unknown flag -kl_bound. The nearest valid name is --kl_bound.",
    "grpo --kl_bound: 1": "unknown flag --kl_bound:. The nearest valid name is --kl_bound.",
    "grpo --frobnicate": "unknown flag --frobnicate. No valid name is near it.",
    "grpo -x 1": "unknown flag -x. No valid name is near it.",
    "rloo --trust_region mask": "`trust_region` 'mask' is an option of GRPO alone: a mask decides token by token",
    "rloo --loss_type dapo": "--loss_type. It is an option of grpo",
    "grpo --algorithm rloo": "`algorithm` is rloo, but this is `troll grpo`",
    # Values of flags
    "grpo --kl_bound tight": "--kl_bound/--kl-bound: invalid number or 'auto' value: 'tight'",
    "grpo --kl_bound None": "--kl_bound/--kl-bound: invalid number or 'auto' value: 'None'",
    "grpo --kl_bound": "--kl_bound/--kl-bound: expected one argument",
    "grpo --kl_bound -1": "`kl_bound` must be positive or 'auto', got -1.0",
    "grpo --learning_rate 1e-6x": "--learning_rate/--learning-rate: invalid float value: '1e-6x'",
    "grpo --learning_rate nan": "`learning_rate` must be at least 0 and finite, got nan",
    "grpo --learning_rate 1 2": "unrecognized arguments: 2",
    "grpo --max_steps 1.5": "--max_steps/--max-steps: invalid int value: '1.5'",
    "grpo --max_steps true": "--max_steps/--max-steps: invalid int value: 'true'",
    "grpo --seed none": "--seed: invalid int value: 'none'",
    "grpo --max_train_samples 0": "`max_train_samples` must be a whole number of at least 1, got 0",
    "grpo --method clipp": "--method: invalid choice: 'clipp' (choose from ",
    "grpo --trust_region prjection": "`trust_region` must be ",
    "grpo --loss_type bnppo": "--loss_type/--loss-type: invalid choice: 'bnppo'",
    "grpo --lr_scheduler_type constnat": "invalid choice: 'constnat' (choose from ",
    "grpo --use_vllm perhaps": "--use_vllm/--use-vllm: Truthy value expected: got perhaps",
    "grpo --reward_weights 1 a": "--reward_weights/--reward-weights: invalid float value: 'a'",
    "grpo --generation_kwargs {a:1}": "invalid JSON mapping value: '{a:1}'",
    "grpo --generation_kwargs [1]": "invalid JSON mapping value: '[1]'",
    "rloo --reward_clip_range 1": "--reward_clip_range/--reward-clip-range: expected 2 arguments",
    "rloo --reward_clip_range 1 2 3": "unrecognized arguments: 3",
    "grpo stray": "unrecognized arguments: stray",
    # Flags of the launcher, alone and next to ours
    "grpo --num_processes two": "--num_processes/--num-processes: invalid int value: 'two'",
    "grpo --num_processes": "--num_processes/--num-processes: expected one argument",
    "grpo --num_processes -3": "`num_processes` must be at least 1, got -3",
    "grpo --num_machines 0": "`num_machines` must be at least 1, got 0",
    "grpo --num_processes 2 3": "unrecognized arguments: 3",
    "grpo --num_proceses 2 --seed 1": "unknown flag --num_proceses. The nearest valid name is --num_processes.",
    "grpo --num_processes 2 --sede 1": "unknown flag --sede. The nearest valid name is --seed.",
    "grpo --num_processes 2 --max_steps many": "--max_steps/--max-steps: invalid int value: 'many'",
    "grpo --num_processes 2 stray": "unrecognized arguments: stray",
    "grpo --mixed_precision fp17": "--mixed_precision/--mixed-precision: invalid choice: 'fp17'",
    "grpo --multi_gpu=perhaps": "`multi_gpu` must be true or false, got 'perhaps'",
    "grpo --accelerate_config fsdp3": "'fsdp3' is neither a file nor one of ddp, fsdp1, fsdp2",
    "grpo --accelerate_config bracket.yaml": "bracket.yaml cannot be read",
    "grpo --accelerate_config items.yaml": "items.yaml must map names to values",
    "grpo --config_file gone.yaml": "--config_file: There is no file gone.yaml",
    "grpo --config_file run.yaml --accelerate_config ddp": "`config_file` and `accelerate_config` are both set",
    # What `--config` names
    "grpo --config": "argument --config: expected one argument",
    "grpo --config ''": "'' is a folder",
    "grpo --config folder": "folder is a folder, and no config that comes with the package has this name.",
    "grpo --config nowhere.yaml": "There is no file nowhere.yaml, and no config",
    "grpo --config qwen3-8b/dappo": "qwen3-8b/dappo, and no config that comes with the package has this name. "
    "The nearest is qwen3-8b/dapo. `troll configs` lists all.",
    "grpo --config qwen8b/gsm8k": "The nearest is qwen3-8b/gsm8k.",
    "grpo --config configs/qwen3-8b/mth.yaml": "The nearest is qwen3-8b/math.",
    "rloo --config quickstart": "unknown key `loss_type`",
    "grpo --config latin.yaml": "latin.yaml cannot be read: 'utf-8' codec can't decode",
    # Files
    "grpo --config key.yaml": "key.yaml: unknown key `lerning_rate`. The nearest valid name is learning_rate.",
    "grpo --config near.yaml": "near.yaml: unknown key `max_prompt_length`. Write `max_prompt_tokens`",
    "grpo --config number.yaml": "number.yaml: argument --learning_rate/--learning-rate: invalid float value: '1e-6x'",
    "grpo --config whole.yaml": "whole.yaml: argument --max_steps/--max-steps: invalid int value: '1e3'",
    "grpo --config boolean_for_number.yaml": "invalid float value: 'true'",
    "grpo --config text_for_boolean.yaml": "text_for_boolean.yaml: argument --use_vllm/--use-vllm: Truthy value",
    "grpo --config list.yaml": "list.yaml: `learning_rate` must be float, got ['1e-6']",
    "grpo --config list_of_two.yaml": "list_of_two.yaml: `kl_bound` must be float | str, got ['0.1', '0.2']",
    "grpo --config mapping.yaml": "mapping.yaml: `learning_rate` must be float, got {'rate': 1e-06}",
    "grpo --config mapping_in_list.yaml": "`reward_funcs` must be list[str], got [{'a': 1}]",
    "grpo --config list_for_mapping.yaml": "`generation_kwargs` must be dict | str | None, got ['a']",
    "grpo --config null.yaml": "null.yaml: `seed` must be int, got None",
    "grpo --config none.yaml": "none.yaml: argument --max_steps/--max-steps: invalid int value: 'None'",
    "grpo --config null_bound.yaml": "null_bound.yaml: `kl_bound` must be float | str, got None",
    "grpo --config null_list.yaml": "null_list.yaml: `reward_funcs` must be list[str], got None",
    "grpo --config null_model.yaml": "`model_name_or_path` must be set",
    "grpo --config choice.yaml": "choice.yaml: argument --method: invalid choice: 'clipp'",
    "grpo --config algorithm.yaml": "`algorithm` is ppo, but this is `troll grpo`",
    "grpo --config number_as_key.yaml": "number_as_key.yaml: unknown key `1`",
    "grpo --config processes.yaml": "--num_processes/--num-processes: invalid int value: 'two'",
    "grpo --config list_of_processes.yaml": "list_of_processes.yaml: `num_processes` must be one value, got ['2']",
    "grpo --config switch.yaml": "`multi_gpu` must be true or false, got 'perhaps'",
    "grpo --config env.yaml": "env.yaml: `env` must map names to values.",
    "grpo --config base.yaml": "There is no file gone.yaml, the `base` of",
    "grpo --config own_base.yaml": "own_base.yaml is its own `base`: own_base.yaml -> own_base.yaml",
    "grpo --config twice.yaml": "the key `seed` occurs twice",
    "grpo --config twice_below.yaml": "the key `a` occurs twice",
    "grpo --config bracket.yaml": "bracket.yaml cannot be read: line 1, column 9, at the key `seed`: expected ','",
    "grpo --config tab.yaml": "tab.yaml cannot be read",
    "grpo --config items.yaml": "items.yaml must map names to values (`name: value`), got a list",
    "grpo --config empty.yaml": "empty.yaml must map names to values (`name: value`), got nothing",
    "grpo --config alias.yaml": "alias.yaml cannot be read: line 1, column 7, at the key `seed`: found undefined alias",
    "grpo --config alias_of_itself.yaml": "line 2, column 11, at the key `b`: an alias names what contains it",
    "grpo --config aliases.yaml": "at the key `model_init_kwargs`: there are more than 16 aliases",
    "grpo --config documents.yaml": "documents.yaml cannot be read: line 2, column 1: expected a single document",
    "grpo --config unhashable.yaml": "unhashable.yaml cannot be read",
    # Evaluation
    "eval": "Nothing to do",
    "eval --modle a": "unknown flag --modle. The nearest valid name is --model.",
    "eval --num_processes 2": "unknown flag --num_processes. No valid name is near it.",
    "eval --model a --benchmarks b --output c --n two": "argument --n: invalid int value: 'two'",
    "eval --max_completion_length 5": "unknown flag --max_completion_length. Write `max_new_tokens`.",
    "eval --backend vlm": "argument --backend: invalid choice: 'vlm'",
    "eval --config eval/papr": "The nearest is eval/paper.",
    "eval --config list.yaml": "list.yaml: unknown key `learning_rate`",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "run.yaml").write_text(ENOUGH)
    (tmp_path / "latin.yaml").write_bytes("run_name: schön".encode("latin-1"))
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch):
    def started(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr("accelerate.commands.launch.launch_command", started)
    monkeypatch.setattr("troll_trl.cli.make_trainer.make_trainer", started)
    monkeypatch.setattr(train, "_one_process_is_enough", lambda: True)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which the command replaces
    for name in ("TROLL_LAUNCHED", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):  # which it sets
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_ends_with_one_line(command, folder, capsys):
    words = shlex.split(command)
    if words[0] in ("grpo", "rloo") and command != "grpo --config":
        words[1:1] = ["--config", "run.yaml"]
    with pytest.raises(SystemExit) as stop:
        main.main(words)
    shown = capsys.readouterr()
    assert stop.value.code == 2 and shown.out == ""
    program = " ".join(["troll", *words[:1]]) if words[0] in main.COMMANDS else "troll"
    assert shown.err.startswith(f"{program}: error: ") and shown.err.count("\n") == 1
    assert WRONG[command] in shown.err


def test_every_file_of_the_table_is_tried():
    tried = {Path(word).stem for command in WRONG for word in command.split() if word.endswith(".yaml")}
    assert FILES.keys() <= tried
