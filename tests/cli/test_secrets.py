"""Tokens and passwords get neither into a file of the output folder, which may be uploaded, nor into a message."""

import copy
import json
import pickle
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from training_args import parse_training_args
from transformers import Trainer
from trl import GRPOConfig
from trl_comparison import make_trainer

from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig
from troll_trl.cli.output_folder import check_output_dir, save_settings
from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig
from troll_trl.fields import without_secrets
from troll_trl.trainers.config import ClipGRPOConfig, ClipRLOOConfig

SECRET = "hunter2xyz"
CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}


def holds_secret(path: Path) -> bool:
    """Whether a file has the secret, as it is or as a pickle or an archive of one."""
    return SECRET.encode() in path.read_bytes()


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ({"token": SECRET, "revision": "main"}, {"revision": "main"}),
        ({"use_auth_token": SECRET, "token": True, "password": None}, {"token": True, "password": None}),
        ({"hub_kwargs": [{"HF_TOKEN": SECRET}, 1]}, {"hub_kwargs": [{}, 1]}),
        ({"WANDB_API_KEY": SECRET, "apiKey": SECRET, "aws_secret_access_key": SECRET, "PASSWORD": 12345}, {}),
        ({"headers": {"Authorization": f"Bearer {SECRET}", "X-Api-Key": SECRET}}, {"headers": {}}),
        ({"auth": ("me", SECRET), "clientSecret": SECRET, "credentials": {"user": SECRET}}, {}),
        (f"http://me:{SECRET}@10.0.0.1:8000/v1", "http://10.0.0.1:8000/v1"),
        (f"https://{SECRET}@host", "https://host"),
        (f"https://host/?api_key={SECRET}&page=2", "https://host/?page=2"),
        (f"https://host/data?token={SECRET}", "https://host/data"),
        (f"my_lib.judge(limit=3, api_key='{SECRET}')", "my_lib.judge(limit=3)"),
        (OrderedDict(token=SECRET, a=[OrderedDict(api_keys=[SECRET])]), {"a": [{}]}),
        ({"bearer": SECRET, "db_pwd": SECRET, "secrets": {"a": SECRET}, "cookies": SECRET, "ssh-key": SECRET}, {}),
        (f"https://host/a?X-Amz-Signature={SECRET}&b=1;token={SECRET}#access_token={SECRET}", "https://host/a?b=1"),
        (f"my_lib.judge(2, headers={{'Authorization': '{SECRET}', 'a': 1}})", "my_lib.judge(2, headers={'a': 1})"),
        (f"my_lib.judge('http://me:{SECRET}@host', n=1)", "my_lib.judge('http://host', n=1)"),
        # What only looks like one
        ({"pad_token": "<pad>", "max_new_tokens": 3, "key": 1}, {"pad_token": "<pad>", "max_new_tokens": 3, "key": 1}),
        ({"think_token": "<think>", "backend_token": SECRET, "weekend_token": SECRET}, {"think_token": "<think>"}),
        ("my_lib.penalty( token_cost = 0.1 )", "my_lib.penalty( token_cost = 0.1 )"),
        ("https://host/a@b?rev=1&x=2", "https://host/a@b?rev=1&x=2"),
        ("token", "token"),
        ({"bypass": "a", "sort_keys": True, "monkey": "b"}, {"bypass": "a", "sort_keys": True, "monkey": "b"}),
        ("https://host/a?b=1#c", "https://host/a?b=1#c"),
    ],
)
def test_what_is_left_of_a_setting(setting, left):
    before = copy.deepcopy(setting)
    assert without_secrets(setting) == left
    assert setting == before


def config_with_secrets(cls, folder, **options):
    kwargs = {"token": SECRET, "revision": "main", "nested": {"password": SECRET}}
    url = {"vllm_server_base_url": f"http://me:{SECRET}@10.0.0.1:8000"}
    return cls(str(folder), hub_token=SECRET, model_init_kwargs=kwargs, **url, **CPU, **options)


@pytest.mark.parametrize(
    "cls", [TrollGRPOConfig, TrollRLOOConfig, AsyncTrollGRPOConfig, ClipGRPOConfig, ClipRLOOConfig]
)
def test_a_pickle_and_what_trackers_get_have_no_secret_and_a_copy_has_them(cls, tmp_path):
    config = config_with_secrets(cls, tmp_path)
    torch.save(config, tmp_path / "args.bin")
    assert not holds_secret(tmp_path / "args.bin")
    for shown in (config.to_dict(), config.to_sanitized_dict(), config.to_json_string()):  # all that trackers read
        assert SECRET not in json.dumps(shown, default=str) and "main" in json.dumps(shown, default=str)
    saved = torch.load(tmp_path / "args.bin", weights_only=False)
    assert type(saved) is cls and saved.hub_token is None
    assert saved.model_init_kwargs == {"revision": "main", "nested": {}}
    assert saved.vllm_server_base_url == "http://10.0.0.1:8000"
    assert saved.learning_rate == config.learning_rate and saved.epsilon == config.epsilon
    for copied in (copy.copy(config), copy.deepcopy(config), config):
        assert type(copied) is cls and vars(copied).keys() == vars(config).keys()
        assert copied.hub_token == SECRET and copied.model_init_kwargs["nested"] == {"password": SECRET}
    assert copy.copy(config).model_init_kwargs is config.model_init_kwargs
    assert copy.deepcopy(config).model_init_kwargs is not config.model_init_kwargs


def test_a_secret_field_of_a_subclass_stays_with_it(tmp_path):
    @dataclass
    class Own(TrollGRPOConfig):
        my_api_key: str = ""

    config = Own(str(tmp_path), my_api_key=SECRET, **CPU)
    assert SECRET not in config.to_json_string() and SECRET not in json.dumps(config.to_sanitized_dict())
    assert copy.copy(config).my_api_key == SECRET


@pytest.mark.parametrize("config", [TrollGRPOConfig, GRPOConfig])
def test_no_file_of_a_run_holds_a_token_and_a_push_gets_it(config, tmp_path, monkeypatch):
    """Checkpoints, `save_model`, `save_state`, the push of a checkpoint and of the end; TRL's own config too."""
    uploads = []

    def upload(**options):
        files = [path for path in Path(options["folder_path"]).rglob("*") if path.is_file()]
        uploads.append((options["token"], [path.name for path in files if holds_secret(path)]))
        done = Future()
        done.set_result(None)
        return done

    monkeypatch.setattr("transformers.trainer.hf_api", lambda: SimpleNamespace(upload_folder=upload))
    repository = {"hub_model_id": "me/model", "push_in_progress": None}
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, *_, **__: vars(self).update(repository))
    steps = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    own = {} if config is GRPOConfig else {"kl_bound": 0.01}
    trainer = make_trainer(TrollGRPOTrainer, config, tmp_path, hub_token=SECRET, push_to_hub=True, **steps, **own)
    trainer.args.model_init_kwargs = {"token": SECRET, "revision": "main"}
    trainer.args.hub_strategy = "every_save"
    trainer.train()
    trainer.save_state()
    trainer.save_model(str(tmp_path / "elsewhere"))
    monkeypatch.setattr(type(trainer), "create_model_card", lambda *_, **__: None)
    trainer.push_to_hub()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "training_args.bin" for path in files)
    assert [path for path in files if holds_secret(path)] == []
    assert uploads and all(upload == (SECRET, []) for upload in uploads)
    assert trainer.args.hub_token == SECRET and trainer.args.model_init_kwargs["token"] == SECRET


def test_the_settings_of_a_run_are_saved_without_secrets_and_a_resumed_run_does_not_print_them(tmp_path, caplog):
    settings = {
        "max_steps": 2,
        "hub_token": SECRET,
        "env": {"WANDB_API_KEY": SECRET},
        "model_init_kwargs": {"token": SECRET, "revision": "main"},
        "vllm_server_base_url": f"http://me:{SECRET}@host:8000",
        "reward_funcs": ["math_accuracy", f"my_lib.judge(key_name='a', api_key='{SECRET}')"],
    }
    save_settings(settings, str(tmp_path))
    assert not holds_secret(tmp_path / "config.yaml")
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert saved == {
        "max_steps": 2,
        "model_init_kwargs": {"revision": "main"},
        "vllm_server_base_url": "http://host:8000",
        "reward_funcs": ["math_accuracy", "my_lib.judge(key_name='a')"],
    }
    script = SimpleNamespace(resume=True, algorithm="grpo", method="troll", settings=settings)
    args = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=None, process_index=0)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    check_output_dir(script, args)
    assert "other settings" not in caplog.text
    script.settings = settings | {"model_init_kwargs": {"token": SECRET, "revision": "other"}}
    check_output_dir(script, args)
    assert "`model_init_kwargs` {'revision': 'main'} → {'revision': 'other'}" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"max_steps: 1\nhub_token: {SECRET}: x", "line 2, column 22, at the key `hub_token`"),
        (f"hub_token: '{SECRET}", "at the key `hub_token`"),
        (f"hub_token: [{SECRET}", "cannot be read: line 1"),
        (f"hub_token: *{SECRET}", "at the key `hub_token`: found undefined alias"),
        (
            f"model_init_kwargs: {{token: !{SECRET} a}}",
            "at the key `model_init_kwargs`: could not determine",
        ),
        (f"hub_token: !{SECRET} a", "at the key `hub_token`: could not determine"),
        (f"hub_token: !{SECRET}!a b", "at the key `hub_token`: found undefined tag handle"),
        (f"a: &{SECRET} 1\nhub_token: &{SECRET} 2", "at the key `hub_token`: second occurrence"),
        (f"model_init_kwargs:\n  token: {SECRET}\n revision: main", "line 3, column"),
        (f"model_init_kwargs: {{token: !!int {SECRET}}}", "a value is not what its tag says"),
        (f"model_init_kwargs: {{token: !!bool {SECRET}}}", "a value is not what its tag says"),
        (f"model_init_kwargs: {{token: !!timestamp {SECRET}}}", "a value is not what its tag says"),
        (f'model_init_kwargs: \'{{"token": "{SECRET}"\'', "invalid JSON mapping value: not shown"),
        (f"model_init_kwargs: [{{token: {SECRET}}}]", "`model_init_kwargs` must be"),
        (f"hub_token: [{SECRET}, 1]", "`hub_token` must be"),
        (f"hub_token: {{a: {SECRET}}}", "`hub_token` must be"),
        (f"hub_token {SECRET}", "must map names to values (`name: value`)."),
        (f"- hub_token: {SECRET}", "must map names to values (`name: value`)."),
        (f"base:\n  hub_token: {SECRET}", "`base` must be a path or a list of paths."),
        (f"env: {{WANDB_API_KEY: {SECRET}, HF_TOKEN: [{SECRET}], B: null}}", "`HF_TOKEN`, `B` has no single one"),
        (f"env: [WANDB_API_KEY={SECRET}]", "`env` must map names to values"),
        (f"env: WANDB_API_KEY={SECRET}", "`env` must map names to values"),
        (f"hub_tokn: {SECRET}", "unknown key `hub_tokn`"),
    ],
)
def test_a_broken_file_names_its_key_and_not_its_value(text, said, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    flags = ("--model_name_or_path", "m", "--dataset_name", "d", "--use_cpu", "--bf16", "false")
    with pytest.raises(SystemExit):
        parse_training_args(["--config", str(path), *flags])
    message = capsys.readouterr().err
    assert said in message and str(path) in message
    assert SECRET not in message


def test_a_pickled_config_of_a_subclass_has_no_secret(tmp_path):
    config = config_with_secrets(OwnConfig, tmp_path)
    assert SECRET.encode() not in pickle.dumps(config)


class OwnConfig(TrollGRPOConfig):
    """A user's own, which adds nothing."""
