"""Strict parsing: layers, types, and each refusal by name."""

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
from troll_trl.cli.settings.command import stop
from troll_trl.cli.settings.names import EVALUATION, RENAMED, declared_names, describe_unknown, launcher_names
from troll_trl.cli.settings.parser import DOCUMENTED_CHOICES
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


@pytest.fixture
def refusal(parse, capsys):
    """The one paragraph with which a YAML text and flags are refused."""

    def refusal(text: str = "", *flags: str) -> str:
        with pytest.raises(SystemExit) as stop:
            parse(text, *flags)
        assert stop.value.code == 2
        message = capsys.readouterr().err
        assert "Traceback" not in message
        assert message.count("\n") == 1
        return message

    return refusal


# -- What is understood -----------------------------------------------------------------------------------------------


# Under a mapping YAML 1.1 read text, booleans, 8, 750 and a date
NESTED = {
    "1e-7": 1e-7, "-1E+5": -1e5, ".5": 0.5, "5.": 5.0, "1_000": 1000, "010": 10, "-010": -10, "0x10": 16, "0o17": 15,
    ".inf": float("inf"), "12345678901234567890123": 12345678901234567890123, "1__0": "1__0", "1e": "1e",
    "12:30": "12:30", "1:2:3.5": "1:2:3.5", "2024-01-01": "2024-01-01", "off": "off", "Yes": "Yes", "no": "no",
    "true": True, "False": False, "null": None, "~": None, "''": "", "'010'": "010", '"1e-7"': "1e-7",
}  # fmt: skip


@pytest.mark.parametrize("text", NESTED)
def test_numbers_and_text_below_a_mapping_are_what_they_look_like(text, parse, caplog):
    args = parse(f"generation_kwargs:\n  a: {text}\n  b: [{text}, {{c: {text}}}]\n  on: 1\n")[1]
    value = NESTED[text]
    assert args.generation_kwargs == {"a": value, "b": [value, {"c": value}], "on": 1}
    assert type(args.generation_kwargs["a"]) is type(value)
    said = "`generation_kwargs`: a is the text " in caplog.text
    assert said is (text in ("off", "Yes", "no")), "text counts as true where a boolean is expected"


def test_a_text_like_a_boolean_is_named_at_any_depth(parse, caplog):
    """`adjust_scheduler: off` counted as true in silence."""
    parse("accelerator_config:\n  gradient_accumulation_kwargs: {adjust_scheduler: off}\n")
    assert "`accelerator_config`: gradient_accumulation_kwargs.adjust_scheduler is the text 'off'" in caplog.text
    parse("datasets: [{path: a, data_files: {b: Yes}}]\n")
    assert "`datasets`: data_files.b is the text 'Yes'" in caplog.text


def test_numbers_in_mappings_mean_the_same_in_files_and_flags(parse):
    flags = ("--lr_scheduler_kwargs", '{"min_lr": 1e-7}', "--model_init_kwargs", '{"a": "off", "b": [1e5, null]}')
    text = "lr_scheduler_kwargs: {min_lr: 1e-7}\nmodel_init_kwargs:\n  a: off\n  b: [1e5, null]\n"
    for args in (parse("", *flags)[1], parse(text)[1]):
        assert args.lr_scheduler_kwargs == {"min_lr": 1e-7}
        assert args.model_init_kwargs == {"a": "off", "b": [1e5, None]}


def test_values_reach_the_three_dataclasses(parse):
    script_args, training_args, model_args = parse(
        "learning_rate: 1e-6\nkl_bound: 0.1\nlora_r: 4\nreward_funcs: [a.b, c.d]\nlr_scheduler_type: constant\n"
        "chat_template_kwargs: {enable_thinking: false}\n"
    )
    assert type(training_args) is TrollGRPOConfig
    assert training_args.learning_rate == 1e-6  # PyYAML reads it as text
    assert training_args.kl_bound == 0.1
    assert training_args.lr_scheduler_type == "constant"
    assert training_args.chat_template_kwargs == {"enable_thinking": False}
    assert model_args.lora_r == 4
    assert script_args.reward_funcs == ["a.b", "c.d"]


@pytest.mark.parametrize("given", [("kl_bound: auto",), ("kl_bound: 0.3", "--kl_bound", "auto")])
def test_an_automatic_bound_is_saved_as_its_number(parse, given):
    script_args, training_args, _ = parse("steps_per_generation: 16\n" + given[0], *given[1:])
    assert training_args.kl_bound == script_args.settings["kl_bound"] == pytest.approx(0.2)


def test_a_trust_region_of_ones_own_in_a_file_and_as_a_flag(parse, refusal, tmp_path, monkeypatch):
    source = (
        "import troll_trl\nclass Open(troll_trl.TrustRegion):\n    def __call__(self, policy, old, advantages): ...\n"
    )
    (tmp_path / "own_regions.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for given in (("trust_region: own_regions.Open",), ("trust_region: mask", "--trust_region", "own_regions.Open")):
        script_args, training_args, _ = parse(*given)
        assert training_args.trust_region == script_args.settings["trust_region"] == "own_regions.Open"
        assert training_args.make_trust_region().describe() == "Open"
    assert "`trust_region` names 'own_regions.Opne', which gives no trust region: " in refusal(
        "trust_region: own_regions.Opne"
    )


@pytest.mark.parametrize("flags", [("--max_steps", "7"), ("--max_steps=7",), ("--max-steps", "7")])
def test_flags_replace_the_file(parse, flags):
    script_args, training_args, _ = parse("max_steps: 5\nseed: 3", *flags)
    assert (training_args.max_steps, training_args.seed) == (7, 3)
    assert script_args.settings["max_steps"] == 7


def test_config_with_an_equals_sign(tmp_path):
    (tmp_path / "run.yaml").write_text(ENOUGH + "max_steps: 5")
    assert parse_training_args([f"--config={tmp_path / 'run.yaml'}"])[1].max_steps == 5


def test_a_flag_at_its_default_still_replaces_the_file(parse):
    assert parse("num_generations: 4", "--num_generations", "8")[1].num_generations == 8


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


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("resume_from_checkpoint: true", (), True),
        ("resume_from_checkpoint: some/checkpoint-4", (), "some/checkpoint-4"),
        ("", ("--resume_from_checkpoint", "true"), True),
        ("resume_from_checkpoint: true", ("--resume_from_checkpoint", "false"), False),
    ],
)
def test_resume_from_checkpoint_is_a_path_or_true(parse, text, flags, expected):
    assert parse(text, *flags)[1].resume_from_checkpoint == expected


@pytest.mark.parametrize(("given", "expected"), [("true", "group"), ("false", "none"), ("batch", "batch")])
def test_scale_rewards_may_be_a_boolean(parse, given, expected):
    assert parse(f"scale_rewards: {given}")[1].scale_rewards == expected


def test_env_is_set(parse, monkeypatch):
    monkeypatch.setenv("TROLL_TEST_VARIABLE", "before")
    parse("env: {TROLL_TEST_VARIABLE: 3}")
    assert os.environ["TROLL_TEST_VARIABLE"] == "3"
    for text in ("0123456", "12:30:00", "no"):  # YAML reads numbers and a boolean
        parse(f"env: {{TROLL_TEST_VARIABLE: {text}}}")
        assert os.environ["TROLL_TEST_VARIABLE"] == text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("learning_rate", "1e-6", 1e-6),  # PyYAML reads it as text
        ("max_grad_norm", "3", 3.0),
        ("run_name", "7", "7"),
        ("model_revision", "0123456", "0123456"),  # to YAML an octal number
        ("eval_strategy", "no", "no"),  # to YAML a boolean
        ("use_vllm", "'true'", True),
        ("shuffle_dataset", "no", False),
        ("instruction", "'--- begin'", "--- begin"),
        ("hub_model_id", "null", None),
        ("num_generations_eval", "null", None),
        ("reward_weights", "[1, 2.5]", [1.0, 2.5]),
        ("reward_weights", "null", None),
        ("reward_funcs", "one.alone", ["one.alone"]),
        ("report_to", "[wandb, tensorboard]", ["wandb", "tensorboard"]),  # the field takes text as well
        ("lora_target_modules", "[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("model_init_kwargs", "{max_position_embeddings: 4096}", {"max_position_embeddings": 4096}),
    ],
)
def test_a_value_means_in_a_file_what_it_means_as_a_flag(parse, name, text, expected):
    settings = parse(f"{name}: {text}")[0].settings
    assert settings[name] == expected
    assert type(settings[name]) is type(expected)
    if isinstance(expected, list) and name != "report_to":
        assert parse("", f"--{name}", *map(str, expected))[0].settings[name] == expected
    elif isinstance(expected, str | int | float):
        assert parse("", f"--{name}={expected}")[0].settings[name] == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("dataset_config", "null"), ("max_train_samples", "null"), ("max_train_samples", "None")),
        *(
            ("ratio_cap", "none"),
            ("chat_template_kwargs", "null"),
            ("bf16", "null"),
            ("resume_from_checkpoint", "null"),
        ),
    ],
)
def test_none_is_nothing_in_a_file_and_as_a_flag(parse, name, text):
    """`--dataset_config null`, as a config of ours says, named a configuration `null`."""
    assert parse("use_cpu: true", f"--{name}", text)[0].settings[name] is None
    assert parse(f"use_cpu: true\n{name}: {text}")[0].settings[name] is None


def test_an_errors_text_is_one_line(capsys):
    """The hub's message took two, as transformers writes it."""
    with pytest.raises(SystemExit):
        stop("troll grpo", OSError("No connection.\nCheck it."))
    assert capsys.readouterr().err == "troll grpo: error: No connection. Check it.\n"


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


def test_a_file_that_is_its_own_base_is_refused(tmp_path, capsys):
    path = write(tmp_path, one="base: run.yaml", run="base: one.yaml")
    with pytest.raises(SystemExit):
        parse_training_args(["--config", str(path)])
    assert "run.yaml -> one.yaml -> run.yaml" in capsys.readouterr().err


def test_the_layer_with_the_mistake_is_named(tmp_path, capsys):
    path = write(tmp_path, one=f"{ENOUGH}\nlerning_rate: 1", run="base: one.yaml")
    with pytest.raises(SystemExit):
        parse_training_args(["--config", str(path)])
    assert f"{tmp_path / 'one.yaml'}: unknown key `lerning_rate`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base: nowhere.yaml", "nowhere.yaml, the `base` of"),
        ("base: {a: 1}", "`base` must be a path or a list of paths"),
        ("base: [[a]]", "`base` must be a path or a list of paths"),
        ("- max_steps", "must map names to values"),
        ("", "must map names to values"),
        ("max_steps: [1", "cannot be read"),
        ("max_steps: 1\nmax_steps: 2", "`max_steps` occurs twice"),
        ("model_init_kwargs:\n  dtype: a\n  dtype: b", "`dtype` occurs twice"),
        ("env: 3", "`env` must map names to values"),
        ("env: {A: null}", "`env` must map names to values"),
        ("config: other.yaml", "unknown key `config`"),
        ("1: 2", "unknown key `1`"),
        ("generation_kwargs: {a: !!bool abc}", "cannot be read"),
        ("generation_kwargs: {a: !!timestamp abc}", "cannot be read"),
        ("generation_kwargs: {a: !!int off}", "cannot be read: a value is not what its tag says"),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path, capsys, text, expected):
    path = write(tmp_path, run=text)
    with pytest.raises(SystemExit) as stop:
        parse_training_args(["--config", str(path)])
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert expected in message
    assert str(tmp_path / "run.yaml") in message


def test_a_missing_file_is_named(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_training_args(["--config", "nowhere/run.yaml"])
    assert stop.value.code == 2
    assert "There is no file nowhere/run.yaml" in capsys.readouterr().err


# -- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lerning_rate: 1.0e-6", "unknown key `lerning_rate`. The nearest valid name is learning_rate."),
        ("kl_bond: 0.1", "unknown key `kl_bond`. The nearest valid name is kl_bound."),
        ("learning_rate: [1.0e-6]", "`learning_rate` must be float, got ['1.0e-6']"),
        ("learning_rate: {a: 1}", "`learning_rate` must be float, got {'a': 1}"),
        ("learning_rate: small", "--learning_rate/--learning-rate: invalid float value: 'small'"),
        ("learning_rate:", "`learning_rate` must be float, got None"),
        ("max_steps: true", "invalid int value: 'true'"),
        ("max_steps: 1.5", "invalid int value: '1.5'"),
        ("max_steps: 1e3", "invalid int value: '1e3'"),
        ("num_generations: two", "--num_generations/--num-generations: invalid int value: 'two'"),
        ("use_vllm: perhaps", "got perhaps"),
        ("use_vllm: [true]", "`use_vllm` must be bool, got ['true']"),
        ("run_name: [7]", "`run_name` must be str | None, got ['7']"),
        ("reward_funcs: {a: 1}", "`reward_funcs` must be list[str], got {'a': 1}"),
        ("reward_funcs: [a, [b]]", "`reward_funcs` must be list[str], got ['a', ['b']]"),
        ("reward_weights: [1, a]", "invalid float value: 'a'"),
        ("chat_template_kwargs: [1]", "`chat_template_kwargs` must be dict | str | None, got ['1']"),
        ("chat_template_kwargs: enable_thinking=true", "invalid JSON mapping value: 'enable_thinking=true'"),
        ("lr_scheduler_kwargs: min_lr_rate=0.1", "invalid JSON mapping value: 'min_lr_rate=0.1'"),
        ("eval_strategy: off", "invalid choice: 'off' (choose from"),
        ("lr_scheduler_type: constnat", "invalid choice: 'constnat' (choose from"),
        ("dtype: bf16", "invalid choice: 'bf16' (choose from"),
        ("method: trol", "--method: invalid choice: 'trol' (choose from"),
        ("loss_type: bnppo", "--loss_type/--loss-type: invalid choice: 'bnppo' (choose from"),
        ("scale_rewards: groups", "invalid choice: 'groups'"),
        ("importance_sampling_level: tokens", "invalid choice: 'tokens'"),
        ("vllm_mode: colocated", "invalid choice: 'colocated'"),
        ("loss_type: [bnpo]", "`loss_type` must be str, got ['bnpo']"),
    ],
)
@pytest.mark.parametrize("method", ["troll", "clip"])
def test_values_in_a_file_are_refused_with_file_name_and_value(refusal, text, expected, method):
    flags = () if text.startswith("method") else ("--method", method)
    message = refusal(text, *flags)
    assert "run.yaml: " in message
    assert expected in message


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--lerning_rate", "1"), "unknown flag --lerning_rate. The nearest valid name is --learning_rate."),
        (("--lerning-rate=1",), "unknown flag --lerning-rate. The nearest valid name is --learning_rate."),
        (("--learning_r", "1"), "unknown flag --learning_r. The nearest valid name is --learning_rate."),
        (("--conf", "a.yaml"), "unknown flag --conf."),
        (("--learning_rate", "1", "2"), "unrecognized arguments: 2"),
        (("--learn", "1"), "unknown flag --learn. The nearest valid name is --learning_rate."),
        (("--no_use_vllm",), "unknown flag --no_use_vllm. The nearest valid name is --use_vllm."),
        (("--learning_rate", "small"), "invalid float value: 'small'"),
        (("--max_steps", "1.5"), "invalid int value: '1.5'"),
        (("--method", "trol"), "invalid choice: 'trol'"),
        (("--use_vllm", "perhaps"), "perhaps"),
        (("--generation_kwargs", '{"top_k": 1'), "invalid JSON mapping value: '{\"top_k\": 1'"),
        (("--generation_kwargs", "[1]"), "invalid JSON mapping value: '[1]'"),
        (("--fsdp", "full_shard", "--fsdp_config", "nofile.json"), "No such file or directory: 'nofile.json'"),
        (("--max_train_samples", "0"), "`max_train_samples` must be a whole number of at least 1, got 0"),
    ],
)
def test_flags_are_refused_with_name_and_value(refusal, flags, expected):
    assert expected in refusal("", *flags)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dataset_name: null", "`dataset_name` must be set"),
        ("model_name_or_path: null", "`model_name_or_path` must be set"),
        ("resume: true\nresume_from_checkpoint: true", "are both set"),
        ("eval_on_start: true", "`eval_on_start` needs an `eval_strategy`"),
        ("kl_bound: -1", "`kl_bound` must be positive or 'auto', got -1"),
        ("kl_bound: atuo", "argument --kl_bound/--kl-bound: invalid number or 'auto' value: 'atuo'"),
        ("loss_type: cispo", "`loss_type='cispo'` is not supported: a trust region"),
        ("generation_batch_size: 12", "generation_batch_size (12) must be divisible"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_without_a_traceback(refusal, text, expected):
    assert expected in refusal(text)


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


def test_algorithm_decides_the_config(parse, tmp_path):
    assert type(parse("algorithm: rloo\nnormalize_advantages: true")[1]) is TrollRLOOConfig
    assert type(parse("algorithm: rloo", "--method", "clip")[1]) is ClipRLOOConfig
    assert type(parse("algorithm: rloo", "--algorithm", "grpo", "--loss_type", "grpo")[1]) is TrollGRPOConfig
    assert type(parse("", "--algorithm=rloo")[1]) is TrollRLOOConfig


def test_the_launchers_names_are_those_of_accelerate_without_ours():
    assert {"num_processes", "config_file", "accelerate_config", "main_process_port", "multi_gpu"} <= launcher_names(
        "grpo"
    )
    assert launcher_names("grpo") & {"debug", "gradient_accumulation_steps", "env", "help"} == set()


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("datasets: [{name: a}]", "missing 1 required positional argument: 'path'"),
        ("datasets: [{path: a, pth: b}]", "unexpected keyword argument 'pth'"),
        ("datasets: [{path: a}, b]", "`datasets` must be list[trl.scripts.utils.DatasetConfig]"),
        ("streaming: true", "`test_split_size` and `streaming` are for a mixture"),
        ("datasets: [{path: 5}]", "`path` must be text, got 5. Write a number in quotes"),
        ("datasets: [{path: a, name: 2024}]", "`name` must be text, got 2024. Write a number in quotes"),
        ("datasets: [{path: a}]\nstreaming: true\ntest_split_size: 0.5", "cannot split streamed rows"),
        ("datasets: {path: a}", "`datasets` must be list[trl.scripts.utils.DatasetConfig], got {'path': 'a'}"),
        ("test_split_size: 0.1", "`test_split_size` and `streaming` are for a mixture, under `datasets`"),
    ],
)
def test_a_mixture_that_cannot_be_meant_is_refused(parse, capsys, text, expected):
    with pytest.raises(SystemExit):
        parse(text)
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dataset_test_split", "eval_dataset_name"])
def test_evaluation_data_without_an_evaluation_are_warned_of(parse, caplog, name):
    parse(f"dataset_name: d\n{name}: held_out\n")
    assert "Nothing is evaluated: set `eval_strategy: steps`" in caplog.text


def test_a_reward_model_takes_the_place_of_the_default_reward(parse):
    assert parse()[0].reward_funcs == ["math_accuracy"]
    assert parse("reward_model_name_or_path: m")[0].reward_funcs == []
    assert parse("reward_model_name_or_path: m\nreward_funcs: [a.b]")[0].reward_funcs == ["a.b"]


def test_all_unknown_names_are_told_at_once(parse, capsys):
    with pytest.raises(SystemExit):
        parse("lerning_rate: 1\nmax_prompt_length: 512\nnothing_like_it: 3", "--kl_bond", "1", "--torch-dtype=auto")
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("error: 5 names are unknown:") and len(said) == 6
    assert said[1].endswith("unknown key `lerning_rate`. The nearest valid name is learning_rate.")
    assert "`max_prompt_length`. Write `max_prompt_tokens`, which drops" in said[2]
    assert said[3].endswith("`nothing_like_it`. No valid name is near it.")
    assert "--kl_bond. The nearest valid name is --kl_bound." in said[4]
    assert "--torch-dtype. Write `dtype`." in said[5]


def test_renamed_keys_are_unknown_and_the_advice_names_valid_ones():
    valid = declared_names("grpo") | declared_names("rloo")
    assert RENAMED.keys() & valid == set()
    named = {name for advice in RENAMED.values() for name in re.findall(r"`(\w+)[`:]", advice)} - {"env"}
    assert named - valid == set() and named


def test_names_of_training_are_told_their_names_in_an_evaluation():
    """`max_completion_length` had no valid name near it."""
    valid = declared_names("eval")
    assert EVALUATION.keys() <= (declared_names("grpo") | declared_names("rloo")) - valid
    named = {name for advice in EVALUATION.values() for name in re.findall(r"`(\w+)[`:]", advice)}
    assert named and named <= valid
    assert describe_unknown("max_completion_length", valid, "eval") == "Write `max_new_tokens`."


def test_the_files_are_read_before_torch_is_imported(tmp_path):
    """Its import, and those of TRL and the hub, read variables that `env` sets."""
    (tmp_path / "run.yaml").write_text("env: {HF_HOME: here}\nmax_steps: 1")
    code = "import os, sys\nfrom troll_trl.cli.settings.command import read_training_command\n"
    code += "read_training_command(['--config', 'run.yaml'])\n"
    code += "print(os.environ['HF_HOME'], {'torch', 'transformers', 'trl', 'accelerate'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert done.stdout == "here set()\n", done.stderr


def test_nothing_given_says_what_a_run_needs(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_training_args([])
    message = capsys.readouterr().err
    assert stop.value.code == 2
    for word in ("`model_name_or_path`", "`dataset_name`", "troll grpo --config qwen3-0.6b/gsm8k"):
        assert word in message


def test_of_several_processes_one_says_the_mistake(refusal, capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as stop:
        parse_training_args([])
    assert stop.value.code == 2 and capsys.readouterr().err == ""


def test_option_of_the_other_algorithm_says_so(refusal):
    assert "`loss_type`. It is an option of grpo: set `algorithm: grpo`" in refusal("algorithm: rloo\nloss_type: dapo")
    mask = refusal("algorithm: rloo", "--trust_region", "mask")
    assert "`trust_region` 'mask' is an option of GRPO alone: a mask decides token by token" in mask
    assert "--reward_clip_range. It is an option of rloo" in refusal("", "--reward_clip_range", "0", "1")
    assert "--algorithm: invalid choice: 'ppo' (choose from" in refusal("algorithm: ppo")


def test_an_anchor_of_a_file_leaves_its_value_a_number_elsewhere(parse):
    text = "max_completion_length: &length 512\ngeneration_kwargs: {max_new_tokens: *length}"
    _, args, _ = parse(text)
    assert (args.max_completion_length, args.generation_kwargs) == (512, {"max_new_tokens": 512})


def test_a_pair_of_numbers_in_a_file_and_as_a_flag(parse):
    for text, flags in (("reward_clip_range: [0, 1]", ()), ("", ("--reward_clip_range", "0", "1"))):
        assert parse(f"algorithm: rloo\n{text}", *flags)[1].reward_clip_range == [0.0, 1.0]


def test_a_later_config_replaces_the_settings_of_those_before(parse, tmp_path):
    (tmp_path / "more.yaml").write_text("max_steps: 7")
    assert parse("max_steps: 5\nseed: 3", "--config", str(tmp_path / "more.yaml"))[1].max_steps == 7


def test_both_methods_get_the_same_settings(parse):
    text = "learning_rate: 1e-5\nsteps_per_generation: 4\nkl_bound: 0.1"
    troll, clip = (parse(text, "--method", method)[1] for method in ("troll", "clip"))
    ours = {option.name for option in troll_fields(TrollGRPOConfig)}
    assert {name: value for name, value in troll.to_dict().items() if name not in ours} == clip.to_dict()
