"""The command `troll`: its parts, what goes to the launcher and what to the run, and configs by name."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trl
import yaml
from limits import HANG
from repository import ROOT

from troll_trl import __version__
from troll_trl.cli import configs, environment, main, train
from troll_trl.cli.output_folder import save_settings
from troll_trl.cli.settings.layers import config_names, configs_folder, find_config, read_layers
from troll_trl.cli.settings.parser import declared_names
from troll_trl.kernels import dispatch
from troll_trl.lm_head.kernel_check import KernelCheck


def test_help_lists_the_commands_and_version_is_the_packages(capsys):
    for words in ([], ["--"]):  # the second one ended with a KeyError
        main.main(words)
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown for name in main.COMMANDS)
    with pytest.raises(SystemExit) as stop:
        main.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"troll_trl {__version__}\n"


def run_and_list_heavy_imports(*words):
    """The command `troll` in a process of its own, which at last prints what it has imported."""
    code = "import sys\nfrom troll_trl.cli.main import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
    code += "    print({'torch', 'transformers', 'trl', 'accelerate', 'datasets', 'pandas'} & sys.modules.keys())"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=HANG)


@pytest.mark.parametrize("command", sorted(main.COMMANDS.keys() - {"grpo", "rloo", "eval"}))
def test_a_command_with_few_flags_refuses_a_mistyped_one_before_anything_heavy_is_imported(command):
    """`troll quickstart --sede 1` was refused after 5 seconds, in which it imported torch."""
    done = run_and_list_heavy_imports(command, "--sede", "1")
    assert done.returncode == 2 and f"troll {command}: error: " in done.stderr
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("command", ["grpo", "rloo", "eval"])
def test_help_names_every_setting(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main([command, "--help"])
    text = capsys.readouterr().out
    shown = {name.removeprefix("no_") for name in re.findall(r"^  (?:-h, )?--(\w+)", text, re.MULTILINE)}
    assert stop.value.code == 0 and shown == declared_names(command) | {"help"}
    assert text.startswith(f"usage: troll {command} [--config FILE]")
    assert ("Bound ε, in nats" in " ".join(text.split())) == (command != "eval")


@pytest.mark.parametrize("command", [["grpo", "--help"], ["configs"]])
def test_a_reader_that_has_seen_enough_ends_the_command_without_a_traceback(command, monkeypatch):
    """`troll grpo --help | head` ended with a BrokenPipeError."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:  # its end flushes what is left, as the interpreter's does
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as stop:
            main.main(command)
    assert stop.value.code == 128 + signal.SIGPIPE


def test_env_has_trls_lines_and_ours(capsys):
    environment.main([])
    shown = capsys.readouterr().out
    assert f"- TRL version: {trl.__version__}" in shown
    assert f"- troll_trl version: {__version__}" in shown
    assert re.search(r"- LM head: .+ on \w+", shown)


def test_env_shows_the_kernels_of_a_device_that_runs_them(capsys, monkeypatch):
    rows = (
        KernelCheck("fold", True, 2e-7, "8 tokens", ""),
        KernelCheck("tiles", False, float("nan"), "8 tokens", "CompilationError: no such instruction"),
    )
    monkeypatch.setattr(dispatch, "use_triton", lambda device: True)
    monkeypatch.setattr("troll_trl.lm_head.kernel_check.self_check", lambda device: rows)
    environment.main([])
    shown = capsys.readouterr().out
    assert "- kernel fold (8 tokens): agrees with torch to 2.0e-07" in shown
    assert "- kernel tiles (8 tokens): FAILS: CompilationError: no such instruction" in shown


# -- Configs ----------------------------------------------------------------------------------------------------------


def test_there_is_one_copy_of_the_configs_and_every_one_is_listed():
    assert configs_folder() == ROOT / "configs"
    named = {"quickstart", "smollm2-gsm8k-cpu", "qwen3-0.6b/gsm8k", "qwen3-0.6b/gsm8k-one-gpu", "eval/paper"}
    assert named <= set(config_names()) and len(config_names()) == len({*config_names()})
    assert not [name for name in config_names() if re.match("(accelerate|base|data|models)/|paper", name)]


def test_a_config_is_found_by_name_and_a_path_in_the_working_folder_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("qwen3-8b/dapo") == configs_folder() / "qwen3-8b" / "dapo.yaml"
    assert find_config("qwen3-8b/dapo.yaml") == configs_folder() / "qwen3-8b" / "dapo.yaml"
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "dapo.yaml").write_text("seed: 1")
    assert find_config("qwen3-8b/dapo") == Path("qwen3-8b/dapo.yaml")
    for wrong in ("qwen3-8b/dappo", "configs/qwen3-8b/dappo.yaml", "qwen3-8b/dapo-rloo", "qwen38b/dapo"):
        with pytest.raises(ValueError, match=rf"no file {wrong}, .*The nearest is qwen3-8b/dapo\."):
            find_config(wrong)
    with pytest.raises(ValueError, match=r"qwen3-8b is a folder, .*`troll configs` lists all"):
        find_config("qwen3-8b")


@pytest.mark.parametrize("form", ["qwen3-8b/dapo", "configs/qwen3-8b/dapo.yaml", "{}/qwen3-8b/dapo", "below/run.yaml"])
def test_a_combination_has_the_path_of_no_file(form, tmp_path, monkeypatch):
    """A run, and the `base` of a file, may name it as they name a file: in the package, or in a folder of one's own."""
    shutil.copytree(configs_folder(), tmp_path / "configs")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "run.yaml").write_text("base: ../configs/qwen3-8b/dapo.yaml")
    monkeypatch.chdir(tmp_path)
    assert settings_in(form.format(configs_folder())) == settings_in("qwen3-8b/dapo")
    Path("configs/models/qwen3-8b.yaml").write_text("seed: 5")
    own = form.startswith(("configs", "below"))
    assert settings_in(form.format(configs_folder())).get("seed") == ("5" if own else None)


def test_a_combination_that_is_its_own_base_is_refused(tmp_path):
    for name, text in (("paper", "a: 1"), ("models/m", "base: ../m/d.yaml"), ("data/d", "b: 1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"is its own `base`: d.yaml -> m.yaml -> d.yaml"):
        read_layers(tmp_path / "m" / "d.yaml")


def settings_in(name) -> dict:
    return {key: value for layer in read_layers(name) for key, value in layer.values.items()}


def test_a_copied_config_is_one_file_that_says_what_the_original_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    configs.main(["copy", *config_names()])
    assert "--config configs/qwen3-0.6b/gsm8k.yaml\n" in capsys.readouterr().out
    for name in config_names():
        [layer] = read_layers(f"configs/{name}.yaml")
        assert layer.values and layer.values == settings_in(configs_folder() / f"{name}.yaml")
    with pytest.raises(SystemExit) as stop:
        configs.main(["copy", "qwen3-0.6b/gsm8k"])
    assert stop.value.code == 2 and "is there already" in capsys.readouterr().err


def test_the_shown_config_has_each_value_below_the_file_that_sets_it(capsys):
    configs.main(["show", "qwen3-8b/dapo"])
    shown = capsys.readouterr().out
    assert yaml.load(shown, yaml.BaseLoader).keys() == settings_in("qwen3-8b/dapo").keys()
    parts = dict(re.findall(r"^# ---- (\S+)\n(.*?)(?=^# ----|\Z)", shown, re.MULTILINE | re.DOTALL))
    assert list(parts) == [
        *("base/batch.yaml", "paper.yaml", "base/fsdp2.yaml", "models/qwen3-8b.yaml", "data/dapo.yaml"),
        "qwen3-8b/dapo.yaml",
    ]
    assert "\nvllm_gpu_memory_utilization: 0.4  # 16 GB of" in parts["models/qwen3-8b.yaml"]
    assert (
        "\n# vllm_gpu_memory_utilization: 0.3  # replaced by models/qwen3-8b.yaml\n" in parts["base/batch.yaml"]
        and "the projection keeps KL" in parts["base/batch.yaml"]
    )
    assert "output_dir: outputs/qwen3-8b-dapo\n" in parts["qwen3-8b/dapo.yaml"]


# -- Launching --------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path, monkeypatch):
    """What `troll grpo` starts: flags of a run in this process, or the launcher's parsed options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TROLL_LAUNCHED", "")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    calls = []
    monkeypatch.setattr(train, "main", lambda argv, program: calls.append((argv, program)))
    monkeypatch.setattr("accelerate.commands.launch.launch_command", calls.append)
    monkeypatch.setattr(train, "_one_process_is_enough", lambda: True)
    Path("run.yaml").write_text("model_name_or_path: m\ndataset_name: d\nuse_cpu: true\n")

    def started(*flags: str, algorithm: str = "grpo"):
        train.launch(flags, f"troll {algorithm}")
        return calls.pop()

    return started


def test_without_flags_for_the_launcher_this_process_trains(started):
    flags = ["--config", "run.yaml", "--max_steps", "3"]
    assert started(*flags) == (["--algorithm", "grpo", *flags], "troll grpo")
    assert started(*flags, algorithm="rloo") == (["--algorithm", "rloo", *flags], "troll rloo")


def test_flags_go_to_the_launcher_or_to_the_run(started):
    options = started(
        *("--accelerate_config", "fsdp2", "--config", "run.yaml", "--num_processes", "4", "--max_steps=3"),
        *("--main-process-port=29501", "--reward_funcs", "a.b", "c.d", "--debug", "underflow_overflow"),
    )
    assert options.config_file == str(configs_folder() / "accelerate" / "fsdp2.yaml")
    assert (options.num_processes, options.main_process_port) == (4, 29501)
    assert options.module and options.training_script == "troll_trl.cli.train"
    assert int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == 3600, "30 seconds are too few to save on SIGTERM"
    assert options.training_script_args == [
        *("--algorithm", "grpo", "--config", "run.yaml", "--max_steps=3", "--reward_funcs", "a.b", "c.d"),
        *("--debug", "underflow_overflow"),  # both know it: it is the run's
    ]


def test_the_launchers_settings_may_stand_in_the_file_and_flags_replace_them(started):
    text = Path("run.yaml").read_text()
    # accelerate reads its file by itself, as YAML 1.1
    Path("mine.yaml").write_text("num_processes: 2\nfsdp_config: {fsdp_offload_params: no}")
    Path("run.yaml").write_text(f"{text}num_processes: 2\naccelerate_config: mine.yaml")
    options = started("--config", "run.yaml", "--num_processes", "3")
    assert (options.config_file, options.num_processes) == ("mine.yaml", 3)
    assert started("--config", "run.yaml", "--accelerate_config", "zero2").config_file.endswith(
        "trl/accelerate_configs/zero2.yaml"
    )


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("True", True), ("false", False)])
def test_a_switch_of_the_launcher_may_stand_in_the_file(started, value, expected):
    """`multi_gpu: true` became `--multi_gpu=true`, which accelerate refused with its whole usage."""
    Path("run.yaml").write_text(f"{Path('run.yaml').read_text()}num_processes: 2\nmulti_gpu: {value}")
    options = started("--config", "run.yaml")
    assert (options.multi_gpu, options.num_processes) == (expected, 2)


def test_that_accelerate_starts_one_process_in_place_of_several_is_said(started, capsys, monkeypatch):
    """On a machine with fewer than two devices `--num_processes 2` trained in one, with half of the batch."""
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", "none.yaml")
    for flags, said in (
        (("--num_processes", "2"), True),
        (("--num_processes", "2", "--multi_gpu"), False),
        (("--num_processes", "2", "--accelerate_config", "ddp"), False),
        (("--num_processes", "1"), False),
    ):
        started("--config", "run.yaml", *flags)
        assert ("`num_processes` is 2, but with fewer than two devices" in (err := capsys.readouterr().err)) == said
        assert ("`troll grpo … --num_processes 2 --multi_gpu`" in err) == said


def test_settings_are_replaced_as_a_whole(tmp_path, monkeypatch):
    """A kill while they were written left half a file, which `--resume` then compared with."""
    save_settings({"max_steps": "1"}, str(tmp_path))
    before = (tmp_path / "config.yaml").read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_settings({"max_steps": "2"}, str(tmp_path))
    assert (tmp_path / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("flags", "needs"),
    [
        ((), "bf16"),
        (("--bf16", "true"), "bf16"),
        (("--fp16", "--bf16", "false"), "fp16"),
        (("--use_cpu", "false", "--num_processes", "8"), "bf16"),
        (("--use_cpu",), None),
        (("--use_cpu=true", "--fp16", "false"), None),
        (("--bf16=no",), None),
    ],
)
def test_half_precision_without_a_gpu_is_refused_before_a_process_starts(flags, needs, monkeypatch, capsys):
    """The message of transformers came from each process, and did not name `bf16: false`."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(train, "main", lambda *arguments: None)
    monkeypatch.setattr(train, "_launch", lambda *arguments: None)
    arguments = ["--model_name_or_path", "m", "--dataset_name", "d", *flags]
    if needs is None:
        train.launch(arguments, "troll grpo")
        return
    with pytest.raises(SystemExit) as stop:
        train.launch(arguments, "troll grpo")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and f"finds no GPU on this machine, and `{needs}` needs one" in said
    assert "--use_cpu true --bf16 false" in said
