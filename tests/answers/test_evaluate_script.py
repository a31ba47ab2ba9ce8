"""troll_trl.evaluation with tiny models, by transformers: samples, how they resume, and the command."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tests.support.limits import HANG
from tests.support.repository import ROOT
from tests.support.thoughts import OPENED, THOUGHTS, thinking_tokenizer
from tests.tiny import tiny_model
from troll_trl.cli.evaluate import main
from troll_trl.evaluation import EvaluationArguments, evaluate, generation
from troll_trl.evaluation.arguments import DEFAULT_INSTRUCTION
from troll_trl.evaluation.generation import TransformersGenerator, load_model, load_tokenizer
from troll_trl.evaluation.samples import read_samples

SCRIPT = ROOT / "scripts" / "evaluate.py"
# Digits are words of their own, so that some completions state an answer
VOCABULARY = ["<pad>", "<eos>", "<unk>", *map(str, range(10)), *(f"w{i}" for i in range(86)), "<think>"]
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}{{ 'w1' if enable_thinking else 'w0' }}{% endif %}"
)
SETTINGS = {
    "model": "model", "output": "out", "n": 3, "temperature": 1.0, "top_p": 0.9, "max_new_tokens": 12, "batch_size": 4,
    "enable_thinking": False,
}  # fmt: skip
BENCHMARKS = ["one=one.jsonl", "two=two.jsonl"]


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
    save_model(tmp_path / "model")
    for name, count in (("one", 5), ("two", 3)):
        rows = [{"question": " ".join(f"w{n + i}" for i in range(1 + n)), "answer": f"#### {n}"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def flags(*others: str) -> list[str]:
    settings = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    return [*settings, "--benchmarks", *BENCHMARKS, *others]


def arguments(**others) -> EvaluationArguments:
    return EvaluationArguments(**SETTINGS | {"benchmarks": BENCHMARKS, "bootstrap_samples": 99} | others)


def completions(folder: str) -> dict:
    samples = read_samples(Path(folder, "samples.jsonl"))
    return {(one["benchmark"], one["problem"], one["sample"]): one["completion"] for one in samples}


# -- The command ------------------------------------------------------------------------------------------------------


def test_from_flags_to_summary_and_not_run_again(workplace, monkeypatch, capsys):
    monkeypatch.setattr("warnings.showwarning", None)  # the command replaces it
    main(flags("--k", "1", "2"))
    rows = read_samples(Path("out/samples.jsonl"))
    assert len(rows) == 24
    summary = json.loads(Path("out/summary.json").read_text())
    one, two, overall = summary["results"]
    own = [row for row in rows if row["benchmark"] == "one"]
    assert (one["benchmark"], one["problems"], one["n"], one["samples"]) == ("one", 5, [3, 3], 15)
    assert one["metrics"]["mean"]["value"] == pytest.approx(np.mean([row["reward"] for row in own]))
    assert list(one["metrics"]) == ["mean", "pass@2", "maj"]
    assert overall["metrics"]["mean"]["value"] == np.mean([row["metrics"]["mean"]["value"] for row in (one, two)])
    for name in ("truncated", "tokens"):
        assert one[name] == pytest.approx(np.mean([row[name] for row in own]))
    assert 0 < one["truncated"] < 1 and 0 < one["no_answer"] <= 1
    assert summary["settings"]["seed"] == 0 and summary["settings"]["model"] == "model"
    assert "pass@2 %" in Path("out/table.md").read_text() and "pass@2 %" in capsys.readouterr().out
    # A second call makes nothing, and loads no model
    monkeypatch.setattr(generation, "TransformersGenerator", None)
    before = Path("out/samples.jsonl").read_bytes()
    main(flags())
    assert "pass@3 %" in capsys.readouterr().out and Path("out/samples.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_killed_evaluation_keeps_its_samples_and_goes_on(workplace):
    many = "".join(json.dumps({"question": f"w{n % 80} w{n // 80}", "answer": "1"}) + "\n" for n in range(240))
    Path("one.jsonl").write_text(many)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(workplace / "cache")}
    command = [sys.executable, str(SCRIPT), *flags()]
    path = Path("out/samples.jsonl")
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    begun = time.monotonic()
    while not (path.is_file() and len(path.read_bytes()) > 2000) and time.monotonic() - begun < HANG:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = completions("out")
    assert 0 < len(kept) < 243 * 3
    assert "results" not in json.loads(Path("out/summary.json").read_text())
    subprocess.run(command, env=environment, check=True, capture_output=True)
    after = completions("out")
    assert len(after) == 243 * 3 and kept.items() <= after.items()


# -- Resuming ---------------------------------------------------------------------------------------------------------


def test_more_problems_and_samples_are_added(workplace):
    evaluate(arguments(max_problems=2))
    before = completions("out")
    evaluate(arguments(n=4))
    after = completions("out")
    assert (len(before), len(after)) == (12, 32) and before.items() <= after.items()


def test_the_table_has_what_the_command_asks_for(workplace):
    """`--max_problems 2` printed all problems of the folder."""
    asked = {"max_problems": 2, "n": 2}
    alone = evaluate(arguments(output="alone", **asked))["results"]
    evaluate(arguments())
    before = Path("out/samples.jsonl").read_bytes()
    assert evaluate(arguments(**asked))["results"] == alone
    assert [row["benchmark"] for row in evaluate(arguments(benchmarks=BENCHMARKS[1:]))["results"]] == ["two"]
    assert Path("out/samples.jsonl").read_bytes() == before


def test_a_corrected_gold_answer_scores_the_samples_anew(workplace, monkeypatch, caplog):
    """The second call kept the scores of the wrong gold answer."""
    evaluate(arguments())
    before = read_samples(Path("out/samples.jsonl"))
    Path("one.jsonl").write_text(Path("one.jsonl").read_text().replace("#### 3", "#### 7"))
    evaluate(arguments(output="fresh"))
    monkeypatch.setattr(generation, "TransformersGenerator", None)  # nothing is generated
    caplog.set_level("INFO", "troll_trl.evaluation")
    evaluate(arguments())
    assert "3 samples are scored anew, because their gold answers have changed." in caplog.messages
    after = read_samples(Path("out/samples.jsonl"))
    assert after == read_samples(Path("fresh/samples.jsonl"))
    changed = [new for old, new in zip(before, after, strict=True) if old != new]
    assert {one["gold"] for one in changed} == {r"\boxed{7}"} and len(changed) == 3
    assert [one["completion"] for one in before] == [one["completion"] for one in after]


@pytest.mark.parametrize("prompt", ["w9", [{"role": "system", "content": "w9"}, {"role": "user", "content": "w0"}]])
def test_another_benchmark_of_the_same_name_is_refused(workplace, prompt):
    """One row had samples of two files. The second one here has the same text, and its own system message."""
    first = [{"role": "user", "content": "w0"}]
    Path("one.jsonl").write_text(json.dumps({"prompt": first, "solution": "1"}) + "\n")
    evaluate(arguments())
    before = Path("out/samples.jsonl").read_bytes()
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    Path("other.jsonl").write_text(json.dumps({"prompt": messages, "solution": "1"}) + "\n")
    with pytest.raises(ValueError, match=r"samples of another 'one': .* the problem 'w0'"):
        evaluate(arguments(benchmarks=["one=other.jsonl"]))
    assert Path("out/samples.jsonl").read_bytes() == before


def test_other_settings_do_not_continue_a_run(workplace):
    evaluate(arguments())
    before = Path("out/samples.jsonl").read_bytes()
    for change, message in (
        ({"temperature": 0.5, "system_prompt": "w5"}, "`system_prompt` was None .* `temperature` was 1.0 and is 0.5"),
        ({"max_new_tokens": 100, "overwrite": True}, "Lower `max_new_tokens`"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(arguments(**change))
        assert Path("out/samples.jsonl").read_bytes() == before
    evaluate(arguments(system_prompt="w5", overwrite=True))
    assert Path("out/samples.jsonl").read_bytes() != before and len(completions("out")) == 24


def test_a_model_that_was_trained_on_since_is_not_taken_for_the_old_one(workplace):
    evaluate(arguments(output="model"))  # its own files there change nothing
    evaluate(arguments(output="model"))
    os.utime("model/model.safetensors", (1, 1))
    with pytest.raises(ValueError, match="`saved_at` was"):
        evaluate(arguments(output="model"))


# -- Samples ----------------------------------------------------------------------------------------------------------


def test_rows_of_one_problem_are_its_samples(workplace):
    Path("one.jsonl").write_text('{"question": "w1 w2", "answer": "1"}\n' * 3 + '{"question": "w3", "answer": "1"}\n')
    [row] = evaluate(arguments(benchmarks=["one=one.jsonl"], n=2))["results"]
    assert (row["problems"], row["n"], row["samples"]) == (2, [2, 6], 8)
    assert len(set(completions("out").values())) > 4


def test_the_seed_changes_samples(workplace):
    for output, seed in (("a", 0), ("b", 0), ("c", 1)):
        evaluate(arguments(output=output, seed=seed))
    same, again, other = map(completions, "abc")
    assert same == again
    assert np.mean([same[key] != other[key] for key in same]) > 0.5


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["chat", "base"])
def test_greedy_completions_of_a_chat_and_a_base_model(workplace, template):
    """Qwen2.5 ships a repetition penalty, which `generate` fills in where nothing is said."""
    model, tokenizer = save_model(workplace / "odd", template=template, repetition_penalty=9.0, do_sample=True)
    evaluate(arguments(model="odd", n=1, temperature=0.0, system_prompt="w5"))
    instruction = ["<unk>"] * len(DEFAULT_INSTRUCTION.split())
    for sample in read_samples(Path("out/samples.jsonl")):
        prompt = ["w5", *sample["problem"].split(), *instruction, *(["w0"] if template else [])]
        ids = start = tokenizer.convert_tokens_to_ids(prompt)
        while len(ids) < len(start) + 12 and ids[-1] != 1:
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        new = ids[len(start) :]
        assert sample["completion"] == tokenizer.decode(new, skip_special_tokens=True)
        assert (sample["tokens"], sample["truncated"]) == (len(new), new[-1] != 1)


def test_temperature_and_top_p_are_those_of_transformers(workplace):
    """The share of each first token is its probability."""
    model, tokenizer = save_model(workplace / "model")
    args = arguments(temperature=0.7, top_p=0.8, max_new_tokens=1)
    generator = TransformersGenerator("model", tokenizer, args, 8)
    drawn = generator.generate([[50, 51]] * 4000, [7] * 4000)
    probabilities = (model(torch.tensor([[50, 51]])).logits[0, -1] / 0.7).softmax(-1)
    values, order = probabilities.sort(descending=True)
    kept = values.cumsum(-1) - values < 0.8
    expected = dict(zip(order[kept].tolist(), (values[kept] / values[kept].sum()).tolist(), strict=True))
    counts = np.bincount(tokenizer.convert_tokens_to_ids([one.text or "<eos>" for one in drawn]), minlength=100)
    assert set(np.flatnonzero(counts)) <= {*expected, 2}
    for token, share in expected.items():
        if token > 2:  # special tokens have no text
            assert abs(counts[token] / 4000 - share) < 4 * np.sqrt(share / 4000)


def test_adapter_with_the_tokenizer_of_its_base_model(workplace):
    base, tokenizer = save_model(workplace / "base")
    base.name_or_path = "base"
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained("adapter")
    assert not Path("adapter/tokenizer.json").exists()
    args = arguments(temperature=0.0, max_new_tokens=8)
    assert load_tokenizer("adapter", args).get_vocab() == tokenizer.get_vocab()
    generators = [TransformersGenerator(name, tokenizer, args, 10) for name in ("base", "adapter")]
    texts = [generator.generate([[50, 51]], [0])[0].text for generator in generators]
    ids = adapted.generate(input_ids=torch.tensor([[50, 51]]), max_new_tokens=8, do_sample=False)[0, 2:]
    assert texts[1] == tokenizer.decode(ids, skip_special_tokens=True) != texts[0]


def test_a_thought_that_the_prompt_opens_and_nobody_closes_is_no_answer(workplace):
    save_model(workplace / "thinker", template="{{ messages[0]['content'] }} <think>")
    evaluate(arguments(model="thinker", enable_thinking=None))
    with pytest.raises(ValueError, match="`enable_thinking` is not set"):  # which the other template reads
        evaluate(arguments(enable_thinking=None, output="other"))
    samples = read_samples(Path("out/samples.jsonl"))
    assert all(one["completion"].startswith("<think>\n") and one["answer"] is None for one in samples)


class Spoken:
    """In place of both engines' models: completes the prompt of problem n with the nth of `texts`."""

    device, generation_config = "cpu", None

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.prompts = tokenizer, []
        self.answers = [tokenizer(text).input_ids for text in texts]

    def answer(self, prompt):
        self.prompts.append(prompt)
        return self.answers[int(self.tokenizer.decode(prompt).partition("number ")[2].split()[0])]

    def to(self, device):
        return self

    eval = lambda self: self

    def generate(self, prompts=None, params=None, input_ids=None, attention_mask=None, **_):
        if prompts is None:  # transformers
            masks = attention_mask.bool()
            answers = [self.answer(row[mask].tolist()) for row, mask in zip(input_ids, masks, strict=True)]
            end = self.tokenizer.eos_token_id
            longest = max(map(len, answers))
            padded = [answer + [end] * (longest + 1 - len(answer)) for answer in answers]
            return torch.cat([input_ids, torch.tensor(padded)], 1)
        answers = [SimpleNamespace(token_ids=self.answer(p["prompt_token_ids"]), finish_reason="stop") for p in prompts]
        return [SimpleNamespace(outputs=[answer]) for answer in answers]


@pytest.fixture
def spoken(workplace, monkeypatch):
    """Evaluate a tokenizer whose model says `texts`; the prompts and the rewards."""

    def evaluate_texts(tokenizer, texts, backend):
        Path("model/chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained("model")
        model = Spoken(AutoTokenizer.from_pretrained("model"), texts)
        monkeypatch.setattr(generation, "load_model", lambda *_: model)
        vllm = ModuleType("vllm")
        vllm.LLM, vllm.SamplingParams, vllm.__spec__ = lambda **_: model, dict, ModuleSpec("vllm", None)
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        rows = [{"question": f"number {n} of {len(texts)}", "answer": "4"} for n in range(len(texts))]
        Path("one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"max_new_tokens": 1, "enable_thinking": None, "output": backend, "instruction": ""}
        evaluate(arguments(benchmarks=["one=one.jsonl"], n=1, backend=backend, **options))
        samples = read_samples(Path(backend, "samples.jsonl"))
        return model.prompts, {texts[int(one["problem"].split()[1])]: one["reward"] for one in samples}

    return evaluate_texts


@pytest.mark.parametrize(("opens", "cases"), [("", THOUGHTS), ("<think>", OPENED)])
@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_thoughts_in_special_tokens_are_read(backend, opens, cases, spoken):
    """Without the tags, answers in thoughts were right, and those after a thought that the template opens were none."""
    _, rewards = spoken(thinking_tokenizer(opens=opens), [text for text, _ in cases], backend)
    assert rewards == dict(cases)


@pytest.mark.parametrize("backend", ["transformers", "vllm"])
def test_no_prompt_ends_in_the_token_that_ends_a_text(backend, spoken):
    """A base model's tokenizer with `add_eos_token` told the model that the text was over."""
    tokenizer = thinking_tokenizer()
    tokenizer.chat_template = None
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    add_eos = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    texts = ["Answer: 4", "Answer: 5"]
    expected, _ = spoken(tokenizer, texts, backend)
    tokenizer.backend_tokenizer.post_processor = add_eos
    assert tokenizer("a").input_ids[-1] == end[1]
    shutil.rmtree(backend)
    assert spoken(tokenizer, texts, backend)[0] == expected


# -- What is refused --------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_lacks_weights_is_refused(workplace):
    from safetensors.torch import load_file, save_file

    weights = load_file("model/model.safetensors")
    weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights .*up_proj"):
        load_model("model", arguments())
    assert not Path("out").exists()


def test_scaled_positions_reach_as_far_as_in_training(workplace):
    """A context that YaRN extends was taken by the trainers and refused here."""
    scaling = {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    tiny_model(max_position_embeddings=64, rope_parameters=scaling).config.save_pretrained("model")
    evaluate(arguments(max_new_tokens=66, max_problems=1))
    with pytest.raises(ValueError, match="made for 96 in all"):
        evaluate(arguments(max_new_tokens=96, output="other"))
