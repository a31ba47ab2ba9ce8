"""Evaluation with vLLM, the real one, on a CPU. Run by `make test-vllm`."""

import functools
import gc
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.engines.vllm_engine import MODEL, SMALL, keep_process_group, model_for_vllm
from tests.tiny import saved_model, tiny_tokenizer
from troll_trl.evaluation import EvaluationArguments, evaluate
from troll_trl.evaluation.generation import VllmGenerator
from troll_trl.evaluation.samples import read_samples

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def small_engines(monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "LLM", functools.partial(vllm.LLM, **SMALL))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # two processes that import all of vLLM for each engine
    keep_process_group()


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a model and a benchmark of 8 problems, made the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    saved_model("model", tie_word_embeddings=False, **MODEL)  # a tied head would repeat the last word
    rows = [{"question": " ".join(f"w{n + i}" for i in range(1 + n)), "answer": f"#### {n}"} for n in range(8)]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def samples(output: str, **settings) -> dict[tuple[str, int], tuple]:
    """What a run samples of each problem and number: its text, tokens, and whether it was cut."""
    given = {"model": "model", "benchmarks": ["p=problems.jsonl"], "instruction": "", "max_new_tokens": 16}
    evaluate(EvaluationArguments(output=output, **(given | settings)))
    rows = read_samples(Path(output, "samples.jsonl"))
    return {(row["problem"], row["sample"]): (row["completion"], row["tokens"], row["truncated"]) for row in rows}


DRAWN = {"backend": "vllm", "n": 3, "temperature": 1.0, "top_p": 0.9}


def test_greedy_samples_are_those_of_transformers(workplace):
    """In float32, with a model that would have its own repetition penalty, and two tokens that end an answer."""
    model = AutoModelForCausalLM.from_pretrained("model")
    first = next(iter(samples("first", backend="transformers").values()))[0].split()
    another_end = tiny_tokenizer().convert_tokens_to_ids(first[5])
    model.generation_config = GenerationConfig(eos_token_id=[1, another_end], pad_token_id=0, repetition_penalty=9.0)
    model.save_pretrained("model")
    expected = samples("transformers", backend="transformers")
    assert samples("vllm", backend="vllm") == expected
    assert {cut for _, _, cut in expected.values()} == {True, False}


def test_a_sample_depends_on_its_seed_alone(workplace):
    """So a run that was killed goes on as if it had not been."""
    whole = samples("whole", **DRAWN)
    assert samples("out", **DRAWN, batch_size=5) == whole
    path = Path("out", "samples.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:12]) + b'{"benchmark": "p')
    assert samples("out", **DRAWN, batch_size=5) == whole
    other = samples("another seed", **DRAWN, seed=1)
    assert sum(other[key] != whole[key] for key in whole) > len(whole) / 2
    assert len(set(whole.values())) > len(whole) / 2


def test_adapter(workplace):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained("model")
    base.name_or_path = "model"
    # B is 0 at the start of a training
    adapter = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapter.save_pretrained("adapter")
    expected = samples("transformers", backend="transformers", model="adapter")
    assert samples("vllm", backend="vllm", model="adapter") == expected
    assert expected != samples("base", backend="transformers")


@pytest.mark.parametrize(("asked", "served"), [("auto", "float32"), ("bfloat16", "bfloat16")])
def test_the_dtype_is_that_of_the_checkpoint_unless_another_is_asked_for(tmp_path, asked, served):
    """vLLM's own "auto" makes bfloat16 of float32, and transformers' does not."""
    folder = model_for_vllm(tmp_path)
    args = EvaluationArguments(model=folder, benchmarks=["gsm8k"], output="out", max_new_tokens=4, dtype=asked)
    generator = VllmGenerator(folder, tiny_tokenizer(), args, max_length=64)
    assert str(generator._model.llm_engine.model_config.dtype) == f"torch.{served}"
    del generator  # the engine's memory with it
    gc.collect()
