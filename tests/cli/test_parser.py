"""Strict parsing: values, layers, and what becomes of them. `test_wrong_commands.py` has what is refused."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from limits import HANG
from training_args import parse_training_args
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, RLOOConfig
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.rloo import RLOOScriptArguments

from troll_trl import TrollGRPOConfig, TrollRLOOConfig
from troll_trl.cli.settings.parser import DOCUMENTED_CHOICES, EVALUATION, RENAMED, declared_names
from troll_trl.trainers.config import ClipGRPOConfig, ClipRLOOConfig, troll_fields

ENOUGH = """
dataset_name: problems.jsonl
model_name_or_path: some/model
use_cpu: true
bf16: false
"""


@pytest.fixture
def parse(tmp_path):
    """Parse a YAML text, on top of what every run needs, and flags."""

    def parse(text: str = "", *flags: str):
        (tmp_path / "enough.yaml").write_text(ENOUGH)
        (tmp_path / "run.yaml").write_text(f"base: enough.yaml\noutput_dir: {tmp_path}/out\n{text}")
        return parse_training_args(["--config", str(tmp_path / "run.yaml"), *flags])

    return parse


# -- Values -----------------------------------------------------------------------------------------------------------

# A field, its value in a file, the words after its flag that say the same, and what both mean
VALUES = [
    ("learning_rate", "1e-6", ["1e-6"], 1e-6),  # PyYAML reads it as text
    ("max_grad_norm", "3", ["3"], 3.0),
    ("kl_bound", "0.1", ["0.1"], 0.1),
    ("run_name", "7", ["7"], "7"),
    ("model_revision", "0123456", ["0123456"], "0123456"),  # to YAML an octal number
    ("eval_strategy", "no", ["no"], "no"),  # to YAML a boolean
    ("lr_scheduler_type", "constant", ["constant"], "constant"),
    ("use_vllm", "'true'", [], True),
    ("shuffle_dataset", "no", ["no"], False),
    ("system_prompt", "'--- begin'", None, "--- begin"),
    ("resume_from_checkpoint", "true", ["true"], True),
    ("resume_from_checkpoint", "some/checkpoint-4", ["some/checkpoint-4"], "some/checkpoint-4"),
    ("scale_rewards", "false", ["false"], False),
    ("scale_rewards", "batch", ["batch"], "batch"),
    ("lora_r", "!!int 4", ["4"], 4),
    # Several
    ("reward_weights", "[1, 2.5]", ["1", "2.5"], [1.0, 2.5]),
    ("reward_funcs", "one.alone", ["one.alone"], ["one.alone"]),
    ("lora_target_modules", "[q_proj, v_proj]", ["q_proj", "v_proj"], ["q_proj", "v_proj"]),
    ("report_to", "[wandb, tensorboard]", None, ["wandb", "tensorboard"]),  # the field takes text as well
    ("report_to", "[]", None, []),
    ("datasets", "[{path: a/b}, {path: c/d}]", ["a/b", "c/d"], [{"path": "a/b"}, {"path": "c/d"}]),
    # A mapping
    ("lr_scheduler_kwargs", "{min_lr: 1e-7}", ['{"min_lr": 1e-7}'], {"min_lr": 1e-7}),
    ("model_init_kwargs", "{a: 'off', b: [1, null]}", ['{"a": "off", "b": [1, null]}'], {"a": "off", "b": [1, None]}),
    # Nothing
    ("dataset_config", "null", ["null"], None),
    ("hub_model_id", "", ["null"], None),
    ("max_train_samples", "None", ["None"], None),
    ("ratio_cap", "~", ["none"], None),
    ("chat_template_kwargs", "null", ["null"], None),
    ("resume_from_checkpoint", "null", ["null"], None),
    ("reward_weights", "null", None, None),
]


@pytest.mark.parametrize(("name", "text", "words", "expected"), VALUES)
def test_a_value_means_in_a_file_what_it_means_as_a_flag(parse, name, text, words, expected):
    given = [parse(f"{name}: {text}")[0].settings[name]]
    given += [] if words is None else [parse("", f"--{name}", *words)[0].settings[name]]
    assert given == [expected] * len(given) and {type(value) for value in given} == {type(expected)}


def test_a_pair_of_numbers_in_a_file_and_as_a_flag(parse):
    for text, flags in (("reward_clip_range: [0, 1]", ()), ("", ("--reward_clip_range", "0", "1"))):
        assert parse(f"algorithm: rloo\n{text}", *flags)[1].reward_clip_range == [0.0, 1.0]


@pytest.mark.parametrize("text", ["inf", ".inf", ".Inf"])
def test_infinity_as_yaml_writes_it_and_as_python_does(parse, text):
    setting = f"trust_region: penalty\ndivergence_type: binary_kl\nepsilon: {text}\nepsilon_high: {text}\n"
    script_args, training_args, _ = parse(setting)
    assert training_args.epsilon == training_args.epsilon_high == script_args.settings["epsilon"] == float("inf")
    assert parse(f"kl_bound: {text}")[1].kl_bound == float("inf")


def test_infinity_as_a_flag(parse):
    penalty = ["--trust_region", "penalty", "--divergence_type", "binary_kl"]
    script_args, training_args, _ = parse("", *penalty, "--epsilon", "inf", "--kl_bound", "inf")
    assert training_args.epsilon == script_args.settings["epsilon"] == training_args.kl_bound == float("inf")


# Under a mapping YAML 1.1 read text, booleans, 8, 750 and a date
NESTED = {
    "1e-7": 1e-7, "-1E+5": -1e5, ".5": 0.5, "5.": 5.0, "1_000": 1000, "010": 10, "-010": -10, "0x10": 16, "0o17": 15,
    ".inf": float("inf"), "12345678901234567890123": 12345678901234567890123, "1__0": "1__0", "1e": "1e",
    "12:30": "12:30", "1:2:3.5": "1:2:3.5", "2024-01-01": "2024-01-01", "'off'": "off",
    "nan": "nan", "Infinity": "Infinity", "12e5678": "12e5678", "١٢": "١٢", "-.inf": -float("inf"),
    "true": True, "False": False, "null": None, "~": None, "''": "", "'010'": "010", '"1e-7"': "1e-7",
}  # fmt: skip


@pytest.mark.parametrize("text", NESTED)
def test_numbers_and_text_below_a_mapping_are_what_they_look_like(text, parse):
    args = parse(f"generation_kwargs:\n  a: {text}\n  b: [{text}, {{c: {text}}}]\n  on: 1\n")[1]
    value = NESTED[text]
    assert args.generation_kwargs == {"a": value, "b": [value, {"c": value}], "on": 1}
    assert type(args.generation_kwargs["a"]) is type(value)


@pytest.mark.parametrize("given", [("kl_bound: auto",), ("kl_bound: 0.3", "--kl_bound", "auto")])
def test_an_automatic_bound_is_saved_as_its_number(parse, given):
    script_args, training_args, _ = parse("steps_per_generation: 16\n" + given[0], *given[1:])
    assert training_args.kl_bound == script_args.settings["kl_bound"] == pytest.approx(0.2)


def test_a_trust_region_of_ones_own_in_a_file_and_as_a_flag(parse, tmp_path, monkeypatch):
    source = (
        "import troll_trl\nclass Open(troll_trl.TrustRegion):\n    def __call__(self, policy, old, advantages): ...\n"
    )
    (tmp_path / "own_regions.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for given in (("trust_region: own_regions.Open",), ("trust_region: mask", "--trust_region", "own_regions.Open")):
        script_args, training_args, _ = parse(*given)
        assert training_args.trust_region == script_args.settings["trust_region"] == "own_regions.Open"
        assert training_args.make_trust_region().describe() == "Open"


@pytest.mark.parametrize("flags", [("--max_steps", "7"), ("--max_steps=7",), ("--max-steps", "7")])
def test_flags_replace_the_file(parse, flags):
    script_args, training_args, _ = parse("max_steps: 5\nseed: 3", *flags)
    assert (training_args.max_steps, training_args.seed) == (7, 3)
    assert script_args.settings["max_steps"] == 7


def test_settings_are_what_was_set_and_nothing_else(parse):
    settings = parse("learning_rate: 1e-6", "--no_shuffle_dataset", "--reward_funcs", "a.b", "c.d")[0].settings
    del settings["output_dir"]
    assert settings == {
        "dataset_name": "problems.jsonl",
        "model_name_or_path": "some/model",
        "use_cpu": True,
        "bf16": False,
        "learning_rate": 1e-6,
        "shuffle_dataset": False,
        "reward_funcs": ["a.b", "c.d"],
    }


def test_an_args_file_beside_the_script_is_not_read(parse, tmp_path, monkeypatch):
    (tmp_path / "train.args").write_text("--max_steps 3")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "train.py")])
    assert parse("max_steps: 5")[1].max_steps == 5


def test_env_is_set(parse, monkeypatch):
    monkeypatch.setenv("TROLL_TEST_VARIABLE", "before")
    parse("env: {TROLL_TEST_VARIABLE: 3}")
    assert os.environ["TROLL_TEST_VARIABLE"] == "3"
    for text in ("0123456", "12:30:00", "no"):  # YAML reads numbers and a boolean
        parse(f"env: {{TROLL_TEST_VARIABLE: {text}}}")
        assert os.environ["TROLL_TEST_VARIABLE"] == text


# -- Layers -----------------------------------------------------------------------------------------------------------


def write(folder: Path, **texts: str) -> Path:
    """Files of the given names and texts; the path of the last one."""
    for name, text in texts.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return path


def test_later_bases_replace_earlier_ones_and_the_file_replaces_all(tmp_path):
    write(
        tmp_path / "base",
        zero="seed: 0\ntop_k: 5",
        one=f"{ENOUGH}\nmax_steps: 1\nseed: 1\nwarmup_steps: 1",
        two="base: zero.yaml\nseed: 2",
    )
    path = write(tmp_path / "runs", run="base: [../base/one.yaml, ../base/two.yaml]\nmax_steps: 3")
    args = parse_training_args(["--config", str(path)])[1]
    assert (args.max_steps, args.seed, args.warmup_steps, args.top_k) == (3, 2, 1, 5)


def test_a_mapping_is_replaced_whole(tmp_path):
    path = write(
        tmp_path,
        one=f"{ENOUGH}\nmodel_init_kwargs: {{a: 1, b: 2}}",
        run="base: one.yaml\nmodel_init_kwargs: {b: 3}",
    )
    assert parse_training_args(["--config", str(path)])[1].model_init_kwargs == {"b": 3}


def test_two_ways_to_the_same_base_are_no_circle(tmp_path):
    path = write(tmp_path, zero=ENOUGH, one="base: zero.yaml", two="base: zero.yaml", run="base: [one.yaml, two.yaml]")
    assert parse_training_args(["--config", str(path)])[2].model_name_or_path == "some/model"


def test_the_layer_with_the_mistake_is_named(tmp_path, capsys):
    path = write(tmp_path, one=f"{ENOUGH}\nlerning_rate: 1", run="base: one.yaml")
    with pytest.raises(SystemExit):
        parse_training_args(["--config", str(path)])
    assert f"{tmp_path / 'one.yaml'}: unknown key `lerning_rate`" in capsys.readouterr().err


# -- Method clip ------------------------------------------------------------------------------------------------------


def test_documented_choices_are_those_that_trl_documents():
    fields = GRPOConfig.__dataclass_fields__
    for name, choices in DOCUMENTED_CHOICES.items():
        documented = GRPOConfig.__doc__ + fields[name].metadata["help"]
        assert fields[name].default in choices
        assert [choice for choice in choices if isinstance(choice, str) and f'"{choice}"' not in documented] == []


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_clip_is_trls_own_config_with_any_of_its_loss_types(parse, loss_type, caplog):
    _, args, _ = parse(f"method: clip\nkl_bound: 0.1\nloss_type: {loss_type}\nepsilon: 0.1", "--support_size", "32")
    assert type(args) is ClipGRPOConfig and fields(args) == fields(GRPOConfig)
    assert (args.loss_type, args.epsilon) == (loss_type, 0.1)
    assert "`method: clip` ignores kl_bound, support_size, which only TROLL uses." in caplog.text


@pytest.mark.parametrize(("ranges", "warned"), [
    ("epsilon: .inf", True), ("epsilon: .inf\nepsilon_high: .inf", True),
    ("epsilon: .inf\nepsilon_high: 1.0", False), ("epsilon: 0.2\nepsilon_high: .inf", False),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_a_clip_that_clips_nothing_is_named(parse, algorithm, ranges, warned, caplog):
    """The recommended penalty has no clip; with `--method clip` its config trained without any limit."""
    penalty = f"algorithm: {algorithm}\ntrust_region: penalty\ndivergence_type: binary_kl\n{ranges}"
    parse(penalty, "--method", "clip")
    said = "`method: clip` clips nothing with `epsilon: .inf`. Give it a range: --epsilon 0.2"
    assert (said in caplog.text) is warned
    caplog.clear()
    parse(penalty)
    assert said not in caplog.text


def test_algorithm_decides_the_config(parse, tmp_path):
    assert type(parse("algorithm: rloo\nnormalize_advantages: true")[1]) is TrollRLOOConfig
    assert type(parse("algorithm: rloo", "--method", "clip")[1]) is ClipRLOOConfig
    assert type(parse("algorithm: rloo", "--algorithm", "grpo", "--loss_type", "grpo")[1]) is TrollGRPOConfig
    assert type(parse("", "--algorithm=rloo")[1]) is TrollRLOOConfig


@pytest.mark.parametrize(("advice", "commands"), [(RENAMED, ("grpo", "rloo")), (EVALUATION, ("eval",))])
def test_renamed_keys_are_unknown_and_the_advice_names_valid_ones(advice, commands):
    valid = {name for command in commands for name in declared_names(command)}
    named = {name for text in advice.values() for name in re.findall(r"`(\w+)[`:]", text)} - {"env"}
    assert advice.keys() & valid == set() and named and named <= valid


def test_every_setting_of_trls_own_commands_is_known():
    for algorithm, arguments in (("grpo", GRPOScriptArguments), ("rloo", RLOOScriptArguments)):
        config = {"grpo": GRPOConfig, "rloo": RLOOConfig}[algorithm]
        types = (arguments, config, ModelConfig, DatasetMixtureConfig)  # of trl/scripts/grpo.py
        assert {f.name for kind in types for f in fields(kind)} - declared_names(algorithm) == set()


MIXTURE = "dataset_name: null\ndatasets:\n- path: json\n  data_files: a.jsonl\n  fraction: 0.5\n"


def test_a_mixture_of_datasets_is_read_as_trl_reads_it(parse, caplog):
    script_args = parse(f"{MIXTURE}test_split_size: 0.25\neval_strategy: steps\neval_steps: 2")[0]
    entry = script_args.mixture.datasets[0]
    assert (entry.path, entry.data_files, entry.fraction, entry.split) == ("json", "a.jsonl", 0.5, "train")
    assert script_args.mixture.test_split_size == 0.25
    assert parse("", "--datasets", "a/b", "c/d")[0].settings["datasets"] == [{"path": "a/b"}, {"path": "c/d"}]
    assert "`datasets` replaces `dataset_name`, which the run ignores" in caplog.text
    assert parse("ignore_bias_buffers: true")[0].ignore_bias_buffers


@pytest.mark.parametrize("name", ["dataset_test_split", "eval_dataset_name"])
def test_evaluation_data_without_an_evaluation_are_warned_of(parse, caplog, name):
    parse(f"dataset_name: d\n{name}: held_out\n")
    assert "Nothing is evaluated: set `eval_strategy: steps`" in caplog.text


def test_a_reward_model_takes_the_place_of_the_default_reward(parse):
    assert parse()[0].reward_funcs == ["math_accuracy"]
    assert parse("reward_model_name_or_path: m")[0].reward_funcs == []
    assert parse("reward_model_name_or_path: m\nreward_funcs: [a.b]")[0].reward_funcs == ["a.b"]


def test_the_files_are_read_before_torch_is_imported(tmp_path):
    """Its import, and those of TRL and the hub, read variables that `env` sets."""
    (tmp_path / "run.yaml").write_text("env: {HF_HOME: here}\nmax_steps: 1")
    code = "import os, sys\nfrom troll_trl.cli.settings.layers import read_command\n"
    code += "read_command(['--config', 'run.yaml'])\n"
    code += "print(os.environ['HF_HOME'], {'torch', 'transformers', 'trl', 'accelerate'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert done.stdout == "here set()\n", done.stderr


def test_an_anchor_of_a_file_leaves_its_value_a_number_elsewhere(parse):
    text = "max_completion_length: &length 512\ngeneration_kwargs: {max_new_tokens: *length}"
    _, args, _ = parse(text)
    assert (args.max_completion_length, args.generation_kwargs) == (512, {"max_new_tokens": 512})


def test_a_later_config_replaces_the_settings_of_those_before(parse, tmp_path):
    (tmp_path / "more.yaml").write_text("max_steps: 7")
    assert parse("max_steps: 5\nseed: 3", "--config", str(tmp_path / "more.yaml"))[1].max_steps == 7


def test_both_methods_get_the_same_settings(parse):
    text = "learning_rate: 1e-5\nsteps_per_generation: 4\nkl_bound: 0.1"
    troll, clip = (parse(text, "--method", method)[1] for method in ("troll", "clip"))
    ours = {option.name for option in troll_fields(TrollGRPOConfig)}
    assert {name: value for name, value in troll.to_dict().items() if name not in ours} == clip.to_dict()
