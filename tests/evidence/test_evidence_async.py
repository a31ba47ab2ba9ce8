"""The study of asynchronous GRPO: the age of its samples, their old policy, its curves and records."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from async_engine import likely_tokens
from evidence_grids import EVIDENCE, cells_of

from evidence import async_tables, asynchronous
from evidence.asynchronous import AsyncRunner, ProblemEngine, Problems, complete
from evidence.grid import Run, content_of, read_grid
from evidence.problems import PHRASES, RARE_PHRASES, make_problems
from evidence.results import read_records
from troll_trl.experimental.async_grpo import AsyncTrollGRPOConfig, sample_log_probs
from troll_trl.small_models import make_model, make_tokenizer, write_problems

GRID = read_grid(EVIDENCE / "async.yaml")
SMALL = {"per_device_train_batch_size": 16, "num_generations": 4, "max_steps": 6, "eval_steps": 3, "warmup_steps": 0}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """As of evidence.starts, without the warm-up: likely tokens are far from certain."""
    folder = tmp_path_factory.mktemp("start")
    write_problems(folder / "data", *make_problems("sums", 0, 64, 20))
    tokenizer = make_tokenizer(PHRASES + RARE_PHRASES)
    torch.manual_seed(0)
    model = make_model(tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4.0)
    for saved in (model, tokenizer):
        saved.save_pretrained(folder / "model")
    return folder


def engine_of(start, support_size, **options):
    config = AsyncTrollGRPOConfig(str(start), use_cpu=True, bf16=False, max_completion_length=8, **SMALL, **options)
    engine = ProblemEngine(start, 0, support_size, config)
    engine.send_weights(engine.model.named_parameters())
    return engine


@pytest.mark.parametrize("method", ["troll", "mask", "clip"])
@pytest.mark.parametrize("age", [1, 4])
def test_samples_are_exactly_so_old_at_the_loss(method, age, start, tmp_path, monkeypatch):
    trainer_class, config_class = asynchronous.CLASSES["clip" if method == "clip" else "troll"]
    at_the_loss = []

    class Recording(trainer_class):
        def compute_loss(self, model, inputs, *args, **kwargs):
            old = inputs["old_log_probs"][inputs["token_index"] >= 0]
            at_the_loss.append((self.model_version, old.reshape(len(old), -1)[:, 0]))
            given.append(self.rollout_worker.given)
            return super().compute_loss(model, inputs, *args, **kwargs)

    given = []
    monkeypatch.setitem(asynchronous.CLASSES, "clip" if method == "clip" else "troll", (Recording, config_class))
    # The verifier's processes take seconds, and random letters seldom earn anything
    monkeypatch.setattr(asynchronous, "math_accuracy_reward", lambda texts, golds: [len(text) % 2 for text in texts])
    run = Run("common", f"{method}-{age}", tuple(sorted({"learning_rate": 1e-3, **SMALL}.items())), 7)
    record = AsyncRunner(GRID, tmp_path, 1).train_and_evaluate(run, start, tmp_path)
    assert len(at_the_loss) == SMALL["max_steps"]
    size = SMALL["per_device_train_batch_size"]
    for update, (version, old) in enumerate(at_the_loss):
        samples = given[-1][update * size : (update + 1) * size]
        trained = [s.old_log_probs.reshape(len(s.input_ids), -1)[s.completion_mask == 1, 0] for s in samples]
        np.testing.assert_array_equal(np.sort(np.concatenate(trained)), np.sort(old.numpy()))
        assert {version - sample.model_version for sample in samples} == {min(age, update)}
    assert record["staleness_max"] == age - 1, "TRL counts when it takes a sample, a batch ahead"
    for curve in (record["curve"], record["sampled"]):
        assert [update for update, _ in curve] == [0, 3, 6]
    assert record["area"] == pytest.approx(np.trapezoid([success for _, success in record["curve"]]) / 2)
    assert record["limited"] is not None and (record["task"], record["method"]) == ("common", f"{method}-{age}")


def test_a_penalty_acts_on_the_tokens_that_it_pulls_not_on_the_clipped_ones():
    """It logs both shares, and without a clip the other one is 0."""
    curves = {name: [(0, 0.1), (16, 0.2)] for name in ("greedy", "sampled")}
    lines = [{"troll/penalized_fraction": share, "clip_ratio/region_mean": 0.0} for share in (0.0, 0.2)]
    assert asynchronous.make_async_record(curves, lines)["limited"] == pytest.approx(0.1)


def plain_log_probs(model, prompt, completion):
    with torch.no_grad():
        return model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("greedy", [True, False])
def test_completions_of_a_padded_batch_with_a_cache_are_those_of_single_prompts(greedy, start):
    engine = engine_of(start, None)
    prompts = [
        engine.problems.prompts[0],
        *[prompt for prompt in engine.problems.prompts if len(prompt) != len(engine.problems.prompts[0])][:7],
    ]
    generator = None if greedy else torch.Generator().manual_seed(0)
    completions, log_probs = complete(engine.model, prompts, 8, generator)
    end = engine.model.config.eos_token_id
    for prompt, completion, row in zip(prompts, completions, log_probs, strict=True):
        expected = plain_log_probs(engine.model, prompt, completion)
        torch.testing.assert_close(row[: len(completion)], expected, rtol=1e-4, atol=1e-4)
        assert len(completion) == 8 or completion[-1] == end
        assert end not in completion[:-1]
        if greedy:
            assert completion == expected.argmax(-1).tolist()
    assert greedy or any(
        row != again for row, again in zip(completions, complete(engine.model, prompts, 8)[0], strict=True)
    )


def test_the_engines_support_and_rewards_are_those_of_its_weights(start):
    engine = engine_of(start, 6)
    engine.problems.rewards = lambda places, completions: np.array([float(c[0] % 2) for c in completions])
    engine.update_model_version(1)
    for sample in engine.group() + engine.group():
        prompt = engine.problems.prompts[sample.group_id]
        completion = sample.input_ids[len(prompt) :].tolist()
        assert sample.input_ids[: len(prompt)].tolist() == prompt
        assert sample.completion_mask.tolist() == [0] * len(prompt) + [1] * len(completion)
        rows = plain_log_probs(engine.model, prompt, completion)
        likely = [likely_tokens(row, token, 6) for row, token in zip(rows, completion, strict=True)]
        sampled = rows[range(len(completion)), completion].tolist()
        expected = sample_log_probs([1] * len(completion), sampled, likely, 6)
        np.testing.assert_allclose(sample.old_log_probs[len(prompt) :], expected, atol=2e-4)
        assert sample.metrics["reward"] == completion[0] % 2
    assert engine.groups == 2


def test_advantages_are_those_of_trls_worker(start):
    engine = engine_of(start, None)
    engine.update_model_version(1)
    engine.problems.rewards = lambda places, completions: np.array([0, 0, 0, 1.0] * 2 + [1.0] * 4 + [0, 1.0, 0, 1.0])
    advantages = np.array([sample.advantage for sample in engine.group()]).reshape(4, 4)
    spread = np.sqrt(3) / 4 + 1e-8
    np.testing.assert_allclose(advantages[0], np.array([-0.25, -0.25, -0.25, 0.75]) / spread)
    np.testing.assert_allclose(advantages[2], 0)
    np.testing.assert_allclose(advantages[3], [-1, 1, -1, 1], rtol=1e-6)


def test_a_right_completion_earns_1(start):
    problems = Problems(start, "test")
    answers = [row["answer"] for row in problems.rows]
    texts = [f"Answer: {answers[0]}", f"Guess: {answers[1]}", "Answer: 200", f"Answer: {answers[3]}"]
    completions = [problems.tokenizer(text + problems.tokenizer.eos_token).input_ids for text in texts]
    assert problems.rewards([0, 1, 2, 3], completions).tolist() == [1, 0, 0, 1]


def test_every_cell_of_the_study_is_a_config_of_its_trainer(tmp_path):
    """TROLL's bound follows the rule of age.yaml, and the clip is TRL's default."""
    assert content_of(GRID.training)[0]["max_staleness"] >= 7
    for method in GRID.methods:
        settings = GRID.settings(Run("label-2", method, (("learning_rate", 4e-4),), 20))
        age, kind = settings.pop("versions_old"), settings.pop("method", "troll")
        assert method.endswith(f"-{age}")
        config = asynchronous.CLASSES[kind][1](str(tmp_path), **content_of(GRID.training)[0] | settings)
        assert (config.max_steps, config.per_device_train_batch_size, config.seed) == (128, 64, 20)
        if method.startswith("troll"):
            assert config.kl_bound == 0.05 * max(8, age) / 8 and config.support_size == 20
        elif method.startswith("mask"):
            assert (config.divergence_type, config.divergence_bound) == ("binary_tv", 0.15)
        elif method.startswith("alone"):
            assert (config.kl_bound, config.epsilon) == (0.05, math.inf)
        elif method.startswith("pull"):
            assert (config.kl_bound, config.epsilon, config.epsilon_high) == (0.05, 0.2, 1.0)
        else:
            assert (config.epsilon, config.epsilon_high) == (0.2, None)


def test_leads_are_paired_by_seed_and_wait_for_all_seeds():
    def record(task, method, seed, area):
        place = {
            "studies": ["deciding"],
            "task": task,
            "method": method,
            "varied": {"learning_rate": 4e-4},
            "seed": seed,
        }
        return place | {"area": area, "success": area, "sampled_area": area / 2, "limited": 0.1}

    lead = {"troll-4": 0.0, "clip-4": -0.05, "mask-4": 0.02, "troll-8": 0.0, "clip-8": 0.0, "mask-8": 0.0}
    records = [
        record(task, method, seed, 0.3 + 0.1 * seed + value * (2 if task == "common" else 1))
        for seed in range(5)
        for task in async_tables.TASKS
        for method, value in lead.items()
    ]
    rows = [row.strip("| ").split(" | ") for row in async_tables.leads(records[:-1]).splitlines()[2:]]
    assert rows == [
        ["4", "TRL's clip", "+5.0 [+5.0, +5.0]", "+10.0 [+10.0, +10.0]", "+7.5 [+7.5, +7.5], p = 0.002"],
        ["4", "`binary_tv`", "-2.0 [-2.0, -2.0]", "-4.0 [-4.0, -4.0]", "-3.0 [-3.0, -3.0], p = 0.002"],
        ["8", "TRL's clip", "+0.0 [+0.0, +0.0]", "+0.0 [+0.0, +0.0]", "+0.0 [+0.0, +0.0], p = 1"],
    ]
    assert "+2.5 [+2.5, +2.5] |" in async_tables.leads(records, "sampled_area")
    reached = async_tables.reached(records[:-1])
    assert "| common | 4 | TRL's clip | 0.0004 | 40.0 [" in reached and reached.count("`binary_tv`") == 3


def test_the_page_of_choices_says_what_the_means_of_both_tasks_say():
    records = read_records(EVIDENCE / "results" / "async.jsonl")
    rows = {int(age): cells for age, *cells in cells_of(async_tables.both_tasks(records))}
    success, area = ({age: [float(c.split(", ")[i]) for c in of] for age, of in rows.items()} for i in (0, 1))
    for age, (troll, mask, clip) in area.items():
        assert (mask > clip) == (age in (4, 8)) and (age != 1 or clip > max(troll, mask))
        assert age == 8 or success[age][2] == max(success[age])
    assert success[8][1] > success[8][0], "the mask ends above the projection"


def test_the_page_tells_what_the_results_say():
    """evidence/async.md, where it has no generated table."""
    page = " ".join((EVIDENCE / "async.md").read_text().split())
    records = read_records(EVIDENCE / "results" / "async.jsonl")
    lag = {}
    for task, age, other in product(async_tables.TASKS, async_tables.AGES, ("clip", "mask")):
        cells = [async_tables.cell(records, task, name, age).values("success").mean() for name in ("troll", other)]
        lag[task, age, other] = round(100 * (cells[1] - cells[0]))
    below = "{}, {} (open) and {} points below the clip at 1, 4 and 8; at 8, with twice their learning rate".format(
        *(lag["label-2", age, "clip"] for age in async_tables.AGES)
    )
    assert f"{below}, also {lag['label-2', 8, 'mask']} below the mask" in page
    assert f"on `common` at 4 it ends {lag['common', 4, 'clip']} below the clip" in page
    pulled = {
        tuple(row[:2]): np.mean(list(map(float, row[3].split(", ")))) for row in cells_of(async_tables.pull(records))
    }
    of = {name: pulled["label-2", async_tables.NAMES.get(name, name)] for name in ("troll", "mask")}
    ends = [
        f"{abs(pulled['label-2', name] - end):.0f}"
        for name in ("clip and binary pull", "binary pull alone")
        for end in of.values()
    ]
    said = "with a clip ends {} points above TROLL and {} below the mask, which has half its learning rate; "
    assert (said + "alone it ends {} above and {} below.").format(*ends) in page
    on_common = [success for (task, _), success in pulled.items() if task == "common"]
    assert max(on_common) - min(on_common) < 5 and "On `common` all end within 5 points (expected: 3)." in page
    served = {r["method"]: r for r in read_records(EVIDENCE / "results" / "async-served.jsonl")}
    runs = [served[f"{name}-4"] for name in ("troll", "mask", "clip")]
    ends = [text for r in runs for text in (f"{100 * r['area']:.1f}", f"{100 * r['success']:.0f}")]
    assert "area of {} and a success of {} %, with `binary_tv` {} and {}, with the clip {} and {}".format(*ends) in page
    assert {round(r["staleness_mean"]) for r in served.values()} == {3}
    assert all(r["staleness_max"] == int(r["method"][-1]) - 1 for r in records)
