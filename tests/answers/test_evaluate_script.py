"""scripts/evaluate.py with tiny models: samples, a kill and a resume, adapters, and a user's mistakes."""

import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from limits import HANG
from logged import logged
from peft import LoraConfig, get_peft_model
from repository import ROOT
from tiny import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from math_answers.evaluation import EvaluationArguments, generate_samples
from math_answers.evaluation.arguments import DEFAULT_INSTRUCTION
from math_answers.evaluation.benchmarks import HUB
from math_answers.evaluation.generation import (
    Completion,
    SeededSampling,
    TransformersGenerator,
    lora_room,
    sample_seed,
)
from math_answers.evaluation.prompts import load_tokenizer, tokenize_prompt
from math_answers.models import model_digest
from troll_trl.cli.evaluate import parse_evaluation_args

SCRIPT = ROOT / "scripts" / "evaluate.py"
VOCABULARY = ["<pad>", "<eos>", "<unk>", "####", *map(str, range(10)), *(f"w{i}" for i in range(86))]
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}{{ 'w1' if enable_thinking else 'w0' }}{% endif %}"
)
THINKING = ["--enable_thinking", "false"]
SETTINGS = ["--n", "3", "--temperature", "1.0", "--top_p", "0.9", "--max_new_tokens", "12", "--batch_size", "4"]


def save_model(folder: Path, seed: int = 0, template: str | None = TEMPLATE, **generation):
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=template
    )
    tokenizer.save_pretrained(folder)
    model = tiny_model(seed=seed, spread=3.0, max_position_embeddings=64)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0, **generation)
    model.save_pretrained(folder)
    return model, tokenizer


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a model and two benchmarks, made the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("gc.collect", lambda: 0)  # half a second, with all that the tests have loaded
    save_model(tmp_path / "model")
    for name, count in (("one", 5), ("two", 3)):
        rows = [{"question": " ".join(f"w{n + i}" for i in range(1 + n)), "answer": f"#### {n}"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def flags(*others: str, output: str = "out", model: tuple[str, ...] = ("model",)) -> list[str]:
    benchmarks = ["--benchmarks", "one=one.jsonl", "two=two.jsonl"]
    return ["--model", *model, *benchmarks, "--output", output, *THINKING, *SETTINGS, *others]


def run_script(*arguments: str, monkeypatch, capsys) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["evaluate.py", *arguments])
    monkeypatch.setattr("warnings.showwarning", None)
    code = 0
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def generate(*arguments: str) -> list[str]:
    with logged() as messages:
        generate_samples(parse_evaluation_args(arguments))
    return messages


def test_from_flags_to_summary_and_not_run_again(workplace, monkeypatch, capsys):
    code, out, err = run_script(*flags("--k", "1", "2"), monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0, err
    rows = lines("out/samples.jsonl")
    assert len({(row["benchmark"], row["problem"], row["sample"]) for row in rows}) == len(rows) == 24
    assert pq.read_table("out/samples.parquet").to_pylist() == rows
    summary = json.loads(Path("out/summary.json").read_text())
    one, two, overall = summary["results"]
    assert (one["benchmark"], one["problems"], one["n"], one["samples"], one["complete"]) == ("one", 5, 3, 15, True)
    mean = np.mean([row["reward"] for row in rows if row["benchmark"] == "one"])
    assert one["metrics"]["mean@3"]["value"] == pytest.approx(mean)
    assert list(one["metrics"]) == ["mean@3", "pass@1", "pass@2", "maj@3", "strict@3"]
    assert overall["metrics"]["mean@3"]["value"] == pytest.approx((mean + two["metrics"]["mean@3"]["value"]) / 2)
    assert one["truncated"] == np.mean([row["truncated"] for row in rows if row["benchmark"] == "one"])
    assert 0 < one["truncated"] < 1 and 0 < one["no_answer"] <= 1
    assert one["mean_tokens"] == np.mean([row["tokens"] for row in rows if row["benchmark"] == "one"])
    for name in ("truncated", "no_answer", "unparsable", "timed_out", "mean_tokens"):
        assert overall[name] == pytest.approx((one[name] + two[name]) / 2), name
    # The prompt as the model saw it, up to where it answers
    unknown = ["<unk>"] * len(DEFAULT_INSTRUCTION.split())
    assert summary["first_prompts"]["model"]["one"].split() == ["w0", *unknown, "w0"]
    assert summary["settings"]["seed"] == 0 and summary["sessions"][0]["versions"]["torch"] == version("torch")
    assert "pass@2 %" in Path("out/table.md").read_text()
    assert "pass@2 %" in out and "disagree on" in out
    # A second call makes nothing, and loads no model
    monkeypatch.setattr("math_answers.evaluation.runner.TransformersGenerator", None)
    before = Path("out/samples.jsonl").read_bytes()
    code, out, err = run_script(*flags(), monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and "24 of 24 samples are in out already" in err and "pass@3 %" in out
    assert Path("out/samples.jsonl").read_bytes() == before


@pytest.mark.parametrize("batches", [0, 3])
def test_a_stopped_run_goes_on_and_ends_as_one_that_was_not(workplace, monkeypatch, batches):
    generate(*flags(output="whole"))
    whole = Path("whole/samples.jsonl").read_bytes()
    real, count = TransformersGenerator.generate, iter(range(100))

    def stop(self, *args):
        if next(count) == batches:
            raise KeyboardInterrupt
        return real(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TransformersGenerator, "generate", stop)
        generate(*flags())
    path = Path("out/samples.jsonl")
    assert len(lines(path)) == 4 * batches
    # A kill amid the write of the next batch
    path.write_bytes(whole[: len(path.read_bytes()) + 700])
    messages = generate(*flags())
    assert any("torn" in text for text in messages)
    assert path.read_bytes() == whole


def test_a_sample_depends_on_its_own_seed_alone(workplace):
    generate(*flags())
    key = lambda row: (row["benchmark"], row["problem"], row["sample"])
    by_key = {key(row): row["completion"] for row in lines("out/samples.jsonl")}
    assert len(set(by_key.values())) > 12
    # Other batches, fewer problems
    generate(*flags("--batch_size", "7", "--max_problems", "4", "1", output="other"))
    other = lines("other/samples.jsonl")
    assert len(other) == 15
    for row in other:
        assert by_key[key(row)] == row["completion"]
    generate(*flags("--seed", "1", output="reseeded"))
    changed = [by_key[key(row)] != row["completion"] for row in lines("reseeded/samples.jsonl")]
    assert np.mean(changed) > 0.5


def test_seeds_differ_and_are_those_of_earlier_versions():
    keys = [(s, m, b, p, i) for s in (0, 1) for m in "ab" for b in "ab" for p in "ab" for i in (0, 1)]
    assert len({sample_seed(*key) for key in keys}) == 32
    assert all(0 <= sample_seed(*key) < 2**63 for key in keys)
    assert sample_seed(0, "a", "b", "c", 0) == 69087467545595265


def test_sampling_takes_the_token_at_which_the_cumulative_probability_passes_the_number():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, -1.0]]).repeat(400, 1)
    seeds = range(400)
    sampling = SeededSampling(seeds, prompt_length=3, max_new_tokens=2)
    probabilities = np.exp(logits[0].double().numpy())
    cumulative = np.cumsum(probabilities / probabilities.sum())
    for step in range(2):
        picked = sampling(torch.zeros(400, 3 + step, dtype=torch.long), logits)
        assert ((picked == 0).sum(dim=1) == 1).all() and picked.isneginf().sum() == 400 * 4
        numbers = np.array([np.random.default_rng(seed).random(2)[step] for seed in seeds])
        assert picked.argmax(dim=1).tolist() == [int((cumulative <= number).sum()) for number in numbers]
    assert not (picked.argmax(dim=1) == 2).any()


def test_the_models_own_generation_config_does_not_change_the_sampling(workplace):
    """Qwen2.5 ships a repetition penalty, which `generate` fills in where nothing is said."""
    model, tokenizer = save_model(workplace / "odd", repetition_penalty=9.0, temperature=0.1, do_sample=True)
    args = EvaluationArguments(model=["odd"], benchmarks=["gsm8k"], output="out", max_new_tokens=10)
    generator = TransformersGenerator("odd", load_tokenizer("odd"), args, 14)
    prompts = [[50, 51, 52, 53], [60, 61]]
    completions = generator.generate(prompts, [0, 0])
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 10 and ids[-1] != 1:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert completion.text == tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
        assert (completion.tokens, completion.truncated) == (len(ids) - len(prompt), ids[-1] != 1)


def test_lora_adapter_of_a_folder_without_a_tokenizer(workplace):
    base, _ = save_model(workplace / "base")
    base.name_or_path = "base"
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained("adapter")
    assert not Path("adapter/tokenizer.json").exists()
    tokenizer = load_tokenizer("adapter")
    args = EvaluationArguments(model=["base"], benchmarks=["gsm8k"], output="out", max_new_tokens=8)
    outputs = [
        TransformersGenerator(name, tokenizer, args, 10).generate([[50, 51]], [0])[0].text
        for name in ("base", "adapter")
    ]
    assert outputs[0] != outputs[1]
    ids = adapted.generate(input_ids=torch.tensor([[50, 51]]), max_new_tokens=8, do_sample=False)[0, 2:]
    assert outputs[1] == tokenizer.decode(ids, skip_special_tokens=True)
    before = model_digest("adapter")
    save_model(workplace / "base", seed=1)
    assert model_digest("adapter") != before
    generate(*flags(model=("base", "adapter")))
    assert {row["model"] for row in lines("out/samples.jsonl")} == {"base", "adapter"}


def test_a_revision_is_not_that_of_an_adapters_base_model(workplace, monkeypatch):
    """Both backends evaluate the base model's default; transformers' loading alone took its `revision`."""
    base, tokenizer = save_model(workplace / "base")
    base.name_or_path = "base"
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained("adapter")
    load, seen = AutoModelForCausalLM.from_pretrained, []
    monkeypatch.setattr(
        "math_answers.evaluation.loading.AutoModelForCausalLM.from_pretrained",
        lambda name, revision, **options: seen.append(revision) or load(name, **options),
    )
    args = EvaluationArguments(model=["base"], benchmarks=["gsm8k"], output="out", revision="v2")
    for name in ("base", "adapter"):
        TransformersGenerator(name, tokenizer, args, 10)
    settings = json.loads(Path("adapter/adapter_config.json").read_text())
    Path("adapter/adapter_config.json").write_text(json.dumps(settings | {"revision": "v1"}))  # that it was trained on
    TransformersGenerator("adapter", tokenizer, args, 10)
    assert seen == ["v2", None, "v1"]


def test_a_model_that_was_trained_on_since_is_not_taken_for_the_old_one(workplace):
    generate(*flags())
    save_model(workplace / "model", seed=1)
    with pytest.raises(ValueError, match="the model model has changed since"):
        generate(*flags())


def test_other_settings_do_not_continue_a_run(workplace):
    generate(*flags())
    before = Path("out/samples.jsonl").read_bytes()
    for change, message in (
        (("--temperature", "0.5"), r"`temperature` was 1\.0 and is 0\.5"),
        (("--n", "2", "--seed", "5"), r"`n` was 3 and is 2; `seed` was 0 and is 5"),
        (("--max_problems", "2"), "the benchmark one has changed since"),
        (("--system_prompt", "w5"), "`system_prompt` was None and is 'w5'"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(*flags(*change))
        assert Path("out/samples.jsonl").read_bytes() == before
    generate(*flags("--system_prompt", "w5", "--overwrite", "true"))
    assert Path("out/samples.jsonl").read_bytes() != before
    assert len(lines("out/samples.jsonl")) == 24


def test_a_mistake_with_the_last_model_shows_before_the_first_is_loaded(workplace, monkeypatch):
    _, tokenizer = save_model(workplace / "wordy")
    tokenizer.chat_template = "{% for n in range(60) %}w1 {% endfor %}" + TEMPLATE
    tokenizer.save_pretrained("wordy")
    monkeypatch.setattr("math_answers.evaluation.runner.TransformersGenerator", None)
    with pytest.raises(ValueError, match=r"longest prompt has \d+ tokens .* but wordy was made for 64 in all\."):
        generate(*flags(model=("model", "wordy")))


def test_scaled_positions_reach_as_far_as_in_training(workplace):
    """A context that YaRN extends was taken by the trainers and refused here."""
    scaling = {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    tiny_model(max_position_embeddings=64, rope_parameters=scaling).config.save_pretrained("model")
    generate(*flags("--max_new_tokens", "66", "--max_problems", "1"))
    with pytest.raises(ValueError, match="made for 96 in all"):
        generate(*flags("--max_new_tokens", "96", output="other"))


def test_a_run_that_failed_before_its_first_sample_does_not_bind_the_next(workplace):
    with pytest.raises(ValueError, match="Lower `max_new_tokens`"):
        generate(*flags("--max_new_tokens", "100"))
    generate(*flags())
    assert json.loads(Path("out/run.json").read_text())["settings"]["max_new_tokens"] == 12


def test_overwrite_discards_nothing_if_the_call_is_a_mistake(workplace):
    generate(*flags())
    before = Path("out/samples.jsonl").read_bytes()
    with pytest.raises(ValueError, match="Lower `max_new_tokens`"):
        generate(*flags("--overwrite", "true", "--max_new_tokens", "100"))
    assert Path("out/samples.jsonl").read_bytes() == before
    assert json.loads(Path("out/run.json").read_text())["settings"]["max_new_tokens"] == 12


def test_an_evaluation_into_the_folder_of_its_model_goes_on(workplace):
    """Its own run.json and summary.json were taken for a change of the model."""
    generate(*flags(output="model"))
    Path("model/all_results.json").write_text("{}")  # of a training
    assert any("24 of 24 samples are in" in text for text in generate(*flags(output="model")))


def test_output_folders_with_a_tilde_and_brackets(workplace, monkeypatch, capsys):
    """The table went to another folder than the summary, and [/1] was taken for rich's markup."""
    monkeypatch.setenv("HOME", str(workplace))
    code, out, err = run_script(*flags(output="~/o[/1]"), monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0, err
    assert {"table.md", "summary.json"} <= {path.name for path in (workplace / "o[" / "1]").iterdir()}
    assert "o[/1]/summary.json" in out


def test_a_sample_twice_is_refused(workplace):
    """It counted twice."""
    generate(*flags())
    path = Path("out/samples.jsonl")
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[0] + "\n")
    with pytest.raises(ValueError, match=r"samples.jsonl holds \('model', .*\) twice"):
        generate(*flags())


@pytest.mark.parametrize("content", [None, "{"])
def test_samples_of_unknown_settings_are_refused(workplace, content):
    generate(*flags())
    Path("out/run.json").unlink() if content is None else Path("out/run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json cannot be read: .* Give another `output`"):
        generate(*flags("--temperature", "0.5"))


def test_a_further_model_and_benchmark_join_a_run(workplace):
    save_model(workplace / "second", seed=1)
    generate("--model", "model", "--benchmarks", "one=one.jsonl", "--output", "out", *THINKING, *SETTINGS)
    first = Path("out/samples.jsonl").read_bytes()
    generate(*flags(model=("model", "second")))
    data = Path("out/samples.jsonl").read_bytes()
    assert data.startswith(first) and len(data.splitlines()) == 48


def test_scored_files_and_generated_samples_do_not_mix(workplace, monkeypatch, capsys):
    row = {"text": "#### 1", "answer": "1"}
    Path("theirs.jsonl").write_text(json.dumps(row) + "\n")
    score = ("--samples", "theirs.jsonl", "--output", "out")
    code, out, err = run_script(*score, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0, err
    assert "the truth may still be 100.0 points away" in out.replace("\n", " ") + Path("out/table.md").read_text()
    with pytest.raises(ValueError, match=r"`samples` was '.*theirs.jsonl' and is None"):
        generate(*flags())
    generate(*flags(output="generated"))
    code, _, err = run_script(*score[:-1], "generated", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2 and "`samples` was None and is" in err


def test_prompts(workplace):
    tokenizer = load_tokenizer("model")
    messages = [{"role": "system", "content": "w7"}, {"role": "user", "content": "w8 w9"}]
    read = lambda **kwargs: tokenizer.decode(tokenize_prompt(tokenizer, messages, **kwargs))
    assert read() == "w7 w8 w9 w0"
    assert read(enable_thinking=True) == "w7 w8 w9 w1"
    tokenizer.chat_template = None
    assert read() == "w7 w8 w9"
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(ValueError, match="refuses a prompt: no system message"):
        read()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (flags("--model", "./nowhere"), "there is no folder ./nowhere"),
        (flags("--model", "cache_of_nothing/empty"), "the folder cache_of_nothing/empty holds"),
        (flags("--model", "model/config.json"), "there is no folder model/config.json"),
        (flags("--model", "bare"), "the folder bare holds no tokenizer"),
        (flags("--benchmarks", "gsm8"), "'gsm8' is neither gsm8k, math, "),
        (
            flags("--benchmarks", "long=long.jsonl"),
            "The longest prompt has 78 tokens and `max_new_tokens` is 12, but model was made for 64 in all. The "
            "prompt is row 0 of long.jsonl. Remove such rows",
        ),
        (flags("--benchmarks", "x=empty.jsonl"), "empty.jsonl is empty"),
        (flags("--k", "4"), "pass@4 needs at least 4 samples of a problem, but `n` is 3"),
        (
            flags("--max_new_tokens", "100"),
            "was made for 64 in all. The prompt is row 4 of one.jsonl. Lower `max_new_tokens` to 46 or less",
        ),
        (flags("--max_problems", "1", "2", "3"), "3 numbers for 2 benchmarks"),
        (flags("--temprature", "1"), "The nearest valid name is --temperature."),
        (flags("--backend", "vllm"), "which is not installed"),
        (flags("--samples", "x.jsonl"), "Give one or the other"),
        (flags("--benchmarks", "one=one.jsonl", "one=two.jsonl"), "has 'one' twice"),
        (["--model", "model", "--output", "out"], "`benchmarks` is not set"),
        (["--output", "out"], "Nothing to do"),
        (["--compare", "a"], "takes two evaluations, got 1"),
        (["--compare", "a", "b"], "a is neither a samples.jsonl nor its folder"),
        (["--samples", "one.jsonl", "--output", "out", "--n", "4"], "`n` is 4, but nothing is generated"),
        (["--compare", "a", "b", "--overwrite"], "`overwrite` is True, but nothing is generated or read but scores"),
        (flags("--completion_column", "x"), "`completion_column` is 'x', but it is for `samples`. Leave"),
        (flags("--benchmarks", "math500", "--answer_column", "x"), "it is for `samples`, or for benchmarks name=path"),
        (flags("--compare", "model", "modle"), "modle is neither a model of this evaluation nor a folder or file"),
        (flags("--model", "adapter"), "the adapter_config.json of adapter has no `base_model_name_or_path`"),
        (["--compare", "a", "b", "--temperature", "1"], "`temperature` is 1.0, but nothing is generated"),
        (["--samples", "one.jsonl", "--output", "out"], "its completion was looked for in"),
        (["--samples", "one.jsonl", "--output", "one.jsonl"], "`output`: one.jsonl is a file; give a folder."),
        (["--compare", "a", "b", "--output", "one.jsonl"], "`output`: one.jsonl is a file; give a folder."),
        (["--config", "bad.yaml"], "unknown key `temprature`. The nearest valid name is temperature."),
    ],
)
def test_a_mistake_ends_in_one_line(workplace, arguments, expected, monkeypatch, capsys):
    save_model(workplace / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (workplace / "bare" / name).unlink()
    (workplace / "cache_of_nothing" / "empty").mkdir(parents=True)
    (workplace / "adapter").mkdir()
    (workplace / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (workplace / "empty.jsonl").touch()
    (workplace / "long.jsonl").write_text(json.dumps({"question": "w1 " * 65, "answer": "1"}) + "\n")
    (workplace / "bad.yaml").write_text("temprature: 1\n")
    expected = expected.replace("the folder cache_of_nothing/empty holds", "cache_of_nothing/empty holds neither")
    find_spec = importlib.util.find_spec  # where vLLM is installed, the mistake of asking for it without is none
    without_vllm = lambda name, *package: None if name == "vllm" else find_spec(name, *package)
    monkeypatch.setattr("importlib.util.find_spec", without_vllm)
    code, _, err = run_script(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    message = err.splitlines()[-1]
    assert code == 2
    assert message.startswith("evaluate.py: error: ")
    assert expected in message
    assert "Traceback" not in err


def test_a_thinking_mode_must_be_said_where_a_template_has_one_and_nowhere_else(workplace):
    """Qwen3's thinks by default, which it was not trained to do by the shipped configs."""
    unsaid = [flag for flag in flags() if flag not in THINKING]
    with pytest.raises(ValueError, match="the chat template of model reads it"):
        generate(*unsaid)
    save_model(workplace / "plain", template="{{ messages[0]['content'] }}")
    plain = ["--model", "plain"]
    with pytest.raises(ValueError, match="no chat template of plain reads it"):
        generate(*flags("--enable_thinking", "true", *plain))
    generate(*flags("--model", "plain", "model", output="both"))  # one of them reads it
    (workplace / "plain" / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template of plain reads it"):
        generate(*flags(*plain))
    generate(*unsaid, *plain)  # a base model is asked with the plain text


@pytest.mark.parametrize("opened", [True, False])
def test_a_thought_that_the_template_opens_and_nothing_closes_is_no_answer(workplace, monkeypatch, opened):
    """As of DeepSeek-R1-Distill: a box in a thought that is cut off was taken for the answer."""
    save_model(workplace / "model", template="{{ messages[0]['content'] }} w1" + " <think>\n" * opened)
    file = workplace / "model" / "tokenizer.json"
    file.write_text(file.read_text().replace('"w5"', '"<think>"'))
    cut = Completion(r"is it \boxed{0}? Or", 12, truncated=True)
    monkeypatch.setattr(TransformersGenerator, "generate", lambda self, prompts, seeds: [cut] * len(prompts))
    generate(*[flag for flag in flags() if flag not in THINKING])
    rows = [row for row in lines("out/samples.jsonl") if row["gold"].endswith("{0}") or row["gold"] == "0"]
    assert rows and {(row["reward"], row["strict"]) for row in rows} == ({(0, 0)} if opened else {(1, 1)})
    assert all(row["completion"] == "<think>\n" * opened + cut.text for row in rows)


def test_a_template_that_says_something_else_the_next_day_is_told(workplace, caplog):
    save_model(workplace / "model", template="{% for digit in strftime_now('%f') %}w{{ digit }} {% endfor %}")
    unsaid = [flag for flag in flags() if flag not in THINKING]
    generate(*unsaid, "--benchmarks", "one=one.jsonl")
    assert "have changed" not in caplog.text
    generate(*unsaid)
    assert "one: the prompts of model have changed since its earlier samples" in caplog.text


@pytest.mark.parametrize(("rank", "room"), [(8, 8), (24, 32), (40, 64), (2, 8)])
def test_vllms_room_for_an_adapter_is_one_that_it_has(rank, room):
    assert lora_room(rank) == room


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "eval").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs(path):
    args = parse_evaluation_args(["--config", str(path), "--model", "m", "--output", "out"])
    assert {name.partition("=")[0] for name in args.benchmarks} <= set(HUB)
    assert (args.temperature == 0) == (args.n == 1)
    if path.stem != "smollm2-cpu":
        assert args.instruction == DEFAULT_INSTRUCTION == training_instruction()


def training_instruction() -> str:
    return yaml.safe_load((ROOT / "configs" / "base" / "batch.yaml").read_text())["instruction"]


def test_compare_after_generating(workplace, monkeypatch, capsys):
    save_model(workplace / "second", seed=1)
    arguments = flags("--compare", "model", "second", model=("model", "second"))
    code, out, err = run_script(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0, err
    comparison = json.loads(Path("out/comparison.json").read_text())
    assert [result["benchmark"] for result in comparison["results"]] == ["one", "two", "overall"]
    assert "B - A" in out


@pytest.mark.slow
def test_sigkill_and_resume(workplace):
    """The whole script killed by the kernel's hand, twice, ends with the samples of one that was not."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    long = ("--max_new_tokens", "30", "--n", "40")
    command = [sys.executable, str(SCRIPT), *flags(*long)]
    path = Path("out/samples.jsonl")
    for least in (1, 40):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        limit = time.monotonic() + HANG
        while not path.is_file() or path.read_bytes().count(b"\n") < least:
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.read_bytes().count(b"\n") < 320
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "samples are in out already" in done.stderr
    generate(*flags(*long, output="whole"))
    assert path.read_bytes() == Path("whole/samples.jsonl").read_bytes()
    assert len(lines(path)) == 320
