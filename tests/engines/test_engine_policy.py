"""`old_policy: engine`: the old policy is what an engine answered while it sampled. The engine here is the model."""

import itertools
import math

import numpy as np
import pytest
import torch
import trl.trainer.grpo_trainer
import trl.trainer.rloo_trainer
from mutated_trl import score_reference_first
from peft import LoraConfig
from test_compatibility import moe
from test_compatibility_models import llava, llava_processor, pictures, qwen_vl, qwen_vl_processor
from test_compatibility_rollouts import byte_tokenizer, chats, multiply
from test_resume import assert_same_run
from tiny import padded_logits, sample_tokens, saved_model, tiny_model
from transformers import TrainerCallback
from trl_comparison import (
    OURS,
    assert_gradient_is_a_finite_difference,
    logged,
    make_trainer,
    micro_batch,
    reference_tokens,
)
from trl_comparison import weights as weights_by_name

from troll_trl import TrollGRPOConfig
from troll_trl.trainers import engine_policy
from troll_trl.trainers.engine_rows import SampledLogProb, read_answer
from troll_trl.trainers.old_policy import OLD_POLICY_KEY, with_dense

V = 100
SGD = {"optim": "sgd", "learning_rate": 0.3}


class AfterEachStep(TrainerCallback):
    def __init__(self, call):
        self.call = call

    def on_step_end(self, *args, **kwargs):
        self.call()


class Engine:
    """In place of TRL's `VLLMGeneration`, in server mode: samples from the trainer's model, in float32, and lists the
    most likely tokens by rank, the sampled one wherever its rank puts it."""

    mode = "server"

    def __init__(self, model, **options):
        self.model, self.options = model, options
        self.logprobs = options["logprobs"]
        self.generator = torch.Generator().manual_seed(0)
        self.vllm_client = self
        self.server_url = "stub"
        self.spoil = lambda listed: listed
        self.speak = lambda prompt: []  # sample
        self.asked = []

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs", "max_logprobs": -1}}

    def sync_weights(self): ...

    @torch.no_grad()
    def generate(self, prompts, images=None, num_generations=1, profiler=None):
        self.asked.append(self.logprobs)
        training, completions, log_probs, ids = self.model.training, [], [], []
        self.model.eval()
        spoken = [self.speak(prompt) for prompt in prompts]
        counts = [0 if words else self.length(number) for number, words in enumerate(spoken)]

        def without_images(rows, numbers):  # no token of an image
            return [each[:, :V] for each in self.logits(rows, images and [images[number] for number in numbers])]

        rows = [list(prompt) + words for prompt, words in zip(prompts, spoken, strict=True)]
        sampled = sample_tokens(without_images, rows, counts, self.generator)
        rows = [row + tokens for row, tokens in zip(rows, sampled, strict=True)]
        for prompt, row, logits in zip(prompts, rows, self.logits(rows, images), strict=True):
            completion, listed = row[len(prompt) :], []
            of_completion = logits[len(prompt) - 1 : len(row) - 1].log_softmax(-1)
            for token, values in zip(completion, of_completion, strict=True):
                top = values.argsort(descending=True)[: self.logprobs or 0].tolist()
                listed.append({i: values[i].item() for i in sorted({*top, token}, key=lambda i: -values[i].item())})
            listed = self.spoil(listed)
            completions.append(completion)
            ids.append([list(row) for row in listed])
            log_probs.append([list(row.values()) for row in listed])
        self.model.train(training)
        return list(prompts), completions, log_probs if self.logprobs is not None else None, ids

    def length(self, number):
        """Of the completion of a prompt that nobody speaks for."""
        return 1 + (3 * number) % self.options["max_completion_length"]

    def logits(self, rows, images):
        """Float32 logits of each row."""
        if images is None:
            return padded_logits(self.model, rows)
        see = lambda image: self.options["processing_class"].image_processor(images=image, return_tensors="pt")
        pairs = zip(rows, images, strict=True)
        return [self.model(torch.tensor([row]), **see(image)).logits[0].float() for row, image in pairs]


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    monkeypatch.setattr(trl.trainer.grpo_trainer, "VLLMGeneration", Engine)
    monkeypatch.setattr(trl.trainer.rloo_trainer, "VLLMGeneration", Engine)
    monkeypatch.setattr("troll_trl.trainers.troll_trainer.check_vllm", lambda args: None)


def trainer_of(folder, algorithm="grpo", old_policy="engine", **options):
    if algorithm == "grpo" and old_policy == "trainer":
        options = {"vllm_importance_sampling_correction": False, **options}
    options = {
        **SGD,
        "max_steps": 5,  # into the second rollout batch
        "beta": 0.0,
        "use_vllm": True,
        "vllm_mode": "server",
        "old_policy": old_policy,
        "kl_bound": 0.01,
        **options,
    }
    return make_trainer(*OURS[algorithm], folder, **options)


def weights(trainer):
    return torch.cat([value.flatten() for value in weights_by_name(trainer).values()])


WHOLE = {"support_size": V, "tail_mass": 0.0}
BINARY_PENALTY = {"trust_region": "penalty", "divergence_type": "binary_kl", "kl_bound": 1e-4, "regression_coef": 10.0}
BINARY_PENALTY |= {"epsilon": math.inf}
# The engine scores images row by row
IMAGES = {"support_size": 101, "make_model": llava, "make_tokenizer": llava_processor, "dataset": pictures()}
IMAGES |= {"max_steps": 3, "max_completion_length": 4}


@pytest.mark.parametrize(("algorithm", "options"), [
    ("grpo", {**WHOLE, "mask_truncated_completions": True}),
    ("grpo", {**WHOLE, "steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 2}),
    ("grpo", {"trust_region": "mask", "divergence_bound": 0.05}),
    pytest.param("grpo", {**WHOLE, "trust_region": "mask", "divergence_type": "topk_kl"}, marks=pytest.mark.slow),
    ("grpo", BINARY_PENALTY),
    ("grpo", {**WHOLE, "trust_region": "penalty", "regression_coef": 10.0}),
    ("grpo", {**WHOLE, "off_policy_mask_threshold": 0.01}),
    ("grpo", {**WHOLE, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "down_proj"]), "learning_rate": 3.0}),
    pytest.param("grpo", {**WHOLE, "make_model": moe}, marks=pytest.mark.slow),
    ("grpo", IMAGES),
    pytest.param("rloo", IMAGES, marks=pytest.mark.slow),
    pytest.param("grpo", {"support_size": 104, "max_steps": 3, "max_completion_length": 4, "within": 5e-4,
                          "make_model": qwen_vl, "make_tokenizer": qwen_vl_processor,
                          "dataset": pictures(width=56, each=2)}, marks=pytest.mark.slow),
    ("grpo", {**WHOLE, "eval_strategy": "steps", "eval_steps": 3, "num_generations_eval": 2}),
    ("rloo", WHOLE),
    ("rloo", BINARY_PENALTY),
])  # fmt: skip
def test_an_engine_with_the_trainers_numbers_trains_its_weights(algorithm, options, tmp_path):
    runs, options = [], dict(options)
    within = options.pop("within", 1e-4)
    makers = {name: options.pop(f"make_{name}") for name in ("model", "tokenizer") if f"make_{name}" in options}
    for old in ("trainer", "engine"):
        made = {name: make() for name, make in makers.items()}
        runs.append(trainer_of(tmp_path / old, algorithm, old, **made, **options))
        starts = weights(runs[-1])
        runs[-1].train()
    assert_same_weights(*runs, starts, within)


def test_the_reference_kl_reads_the_engines_numbers(tmp_path):
    options = {**WHOLE, "beta": 0.1, "use_bias_correction_kl": True}
    model = saved_model(tmp_path / "model")
    runs = []
    for old in ("trainer", "engine"):
        runs.append(trainer_of(tmp_path / old, "grpo", old, model=model, **options))
        runs[-1].train()
    assert torch.allclose(weights(runs[0]), weights(runs[1]), atol=1e-5)


def numbers_of(trainer, prompts):
    """As a rollout function gets them: completions, and the log-probability of every token."""
    _, completions, log_probs, _ = trainer.vllm_generation.generate(prompts)
    return completions, [[value for (value,) in row] for row in log_probs]


def rollout_of(change):
    """A rollout function of two turns, whose tokens in between are an environment's; `change` its log-probabilities.
    Two neighbours continue one first turn."""

    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        first, numbers = numbers_of(trainer, prompt_ids)
        first, numbers = ([rows[i - i % 2] for i in range(len(prompts))] for rows in (first, numbers))
        words = [[5, 6]] * len(prompts)
        so_far = [a + b + c for a, b, c in zip(prompt_ids, first, words, strict=True)]
        second, more = numbers_of(trainer, so_far)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [a + b + c for a, b, c in zip(first, words, second, strict=True)],
            "logprobs": change([[*a, 0.0, 0.0, *b] for a, b in zip(numbers, more, strict=True)]),
            "env_mask": [[1] * len(a) + [0, 0] + [1] * len(b) for a, b in zip(first, second, strict=True)],
        }

    return rollout


def one_turn(change):
    """A rollout function of one turn; `change` its log-probabilities."""

    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions, numbers = numbers_of(trainer, prompt_ids)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": change(numbers)}

    return rollout


def assert_same_weights(trainer_run, engine_run, start, within=1e-4):
    moved = (weights(trainer_run) - start).abs().max().item()
    assert moved > 1e-3
    assert (weights(trainer_run) - weights(engine_run)).abs().max().item() < within * moved


def test_a_rollout_function_of_two_turns(tmp_path):
    runs, rollout = [], rollout_of(lambda rows: rows)
    for old in ("trainer", "engine"):
        runs.append(trainer_of(tmp_path / old, old_policy=old, rollout_func=rollout, **WHOLE))
        start = weights(runs[-1])
        runs[-1].train()
    assert_same_weights(*runs, start)


def test_a_rollout_function_without_the_engines_numbers_is_refused(tmp_path):
    plain = rollout_of(lambda rows: [list(map(float, row)) for row in rows])
    for region in ("projection", "penalty"):
        with pytest.raises(ValueError, match=r"Give a `SampledLogProb`.* or a penalty with a binary `divergence_type`"):
            trainer_of(tmp_path, rollout_func=plain, trust_region=region).train()
    with pytest.raises(ValueError, match="returned no `logprobs`"):
        trainer_of(tmp_path, rollout_func=rollout_of(lambda rows: None)).train()
    mask = {"trust_region": "mask", "divergence_bound": 0.05}
    trainer_of(tmp_path, rollout_func=plain, max_steps=1, **mask).train()  # reads the sampled token alone
    with pytest.raises(TypeError, match="unexpected keyword argument 'rollout_func'"):  # TRL's RLOO has none
        trainer_of(tmp_path, "rloo", rollout_func=plain)


def test_tools(tmp_path):
    """Tool calls and answers to them are two answers of the engine, with the tool's words in between."""
    runs = []
    for old in ("trainer", "engine"):
        tokenizer = byte_tokenizer()
        model = tiny_model(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=2)
        run = trainer_of(
            tmp_path / old,
            old_policy=old,
            model=model,
            tokenizer=tokenizer,
            tools=[multiply],
            dataset=chats(),
            max_completion_length=256,
            max_tool_calling_iterations=1,
            support_size=len(tokenizer),
            tail_mass=0.0,
            steps_per_generation=2,
            max_steps=2,
        )
        called = []

        def speak(prompt, called=called, tokenizer=tokenizer):
            called.append(prompt)
            text = tokenizer.decode(prompt)
            call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
            words = "<tool_response>" in text.rpartition("</tools>")[2] or len(called) % 2
            return tokenizer("It is 6.<|im_end|>" if words else call)["input_ids"]

        run.vllm_generation.speak = speak
        start = weights(run)
        run.train()
        runs.append(run)
    assert_same_weights(*runs, start)
    assert max(logged(runs[1], "tools/call_frequency")) == 0.5 and max(logged(runs[1], "troll/unscored_tokens")) == 0
    for inputs in runs[1]._buffered_inputs:
        trained = (inputs["tool_mask"] * inputs["completion_mask"]).sum()
        assert trained < inputs["completion_mask"].sum() and inputs[OLD_POLICY_KEY].counts.count_nonzero() == trained


def without_the_rest(value):
    row = value.row.copy()
    row[len(row) // 2] = -math.inf
    return SampledLogProb(value, row, value.token)


MUTANTS = {
    "sorted by rank": lambda answer, first: answer(first),
    "shifted by a token": lambda answer, first: (lambda values: values[1:] + values[:1])(answer()),
    "without the rest": lambda answer, first: [*map(without_the_rest, answer())],
}


def mutated(mutant):
    def read(sampled, counts, ids, *others):
        first = [ids[place] for place in np.cumsum([0, *counts[:-1]])]
        values = MUTANTS[mutant](lambda tokens=sampled: read_answer(tokens, counts, ids, *others), first)
        # With the right ids: other ones are refused
        return [SampledLogProb(value, value.row, token) for value, token in zip(values, sampled, strict=True)]

    return read


def test_the_trainers_numbers_train_its_weights_and_mutants_others(tmp_path, monkeypatch):
    """If a mutant passed here, the other comparisons of this file would miss it, too."""
    expected = trainer_of(tmp_path, old_policy="trainer", **WHOLE)
    start = weights(expected)
    expected.train()
    run = trainer_of(tmp_path, **WHOLE)
    run.train()
    assert_same_weights(expected, run, start)
    for mutant in MUTANTS:
        monkeypatch.setattr(engine_policy, "read_answer", mutated(mutant))
        spoiled = trainer_of(tmp_path, **WHOLE)
        spoiled.train()
        with pytest.raises(AssertionError):
            assert_same_weights(expected, spoiled, start)


@pytest.mark.parametrize("mask", [{}, {"trust_region": "mask"}, {"support_size": 1}])
def test_misaligned_numbers_of_a_rollout_function_are_refused(mask, tmp_path):
    """They trained, in silence, with the probabilities of other tokens."""
    run = trainer_of(tmp_path, rollout_func=one_turn(lambda rows: [[*row[1:], row[0]] for row in rows]), **mask)
    run.vllm_generation.length = lambda number: 3 + number // 8
    with pytest.raises(ValueError, match=r"`logprobs` of completion \d+ are misaligned: \d+ of \d+ numbers"):
        run.train()


@pytest.mark.parametrize(("support_size", "kl_bound"), [(2, 2e-5), (20, 5e-4), (V, 2e-3)])
def test_the_loss_is_that_of_an_independent_root_finder_in_float64(support_size, kl_bound, tmp_path):
    """On a rollout batch that three updates have moved away from; and its gradient is a finite difference."""
    options = {
        "support_size": support_size,
        "tail_mass": 0.0,
        "kl_bound": kl_bound,
        "loss_type": "grpo",
        "max_steps": 3,
    }
    run = trainer_of(tmp_path, **options)
    run.train()
    assert max(logged(run, "troll/projected_fraction")) > 0
    assert max(logged(run, "troll/kl_max")) <= kl_bound + 1e-6
    inputs = micro_batch(run, 3)
    loss = run.compute_loss(run.model.train(), inputs)
    mask, projected = inputs["completion_mask"].double(), 0
    expected = torch.zeros_like(mask)
    for b, t, p, q, pi, is_projected in reference_tokens(run, inputs):
        projected += is_projected
        regression = (p.exp() * (p - pi)).nan_to_num(0.0).sum()  # NaN where there is no rest
        expected[b, t] = regression - (pi[0] - q[0]).exp() * inputs["advantages"][b]
    assert projected >= 5
    torch.testing.assert_close(loss.double(), ((expected * mask).sum(1) / mask.sum(1)).mean(), rtol=1e-3, atol=1e-5)
    run.args.regression_coef = 0.0
    assert_gradient_is_a_finite_difference(run, inputs)


@pytest.mark.parametrize("stop", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_resumes_exactly(stop, tmp_path):
    options = {"save_strategy": "steps", "save_steps": stop, "max_steps": 6}
    whole = trainer_of(tmp_path / "whole", **options)
    states = {}

    def speak(prompt):
        states.setdefault(whole.state.global_step, whole.vllm_generation.generator.get_state())
        return []

    whole.vllm_generation.speak = speak
    whole.train()
    resumed = trainer_of(tmp_path / "resumed", **options)
    # A server draws from its own generator: here as if the sampling had gone on
    resumed.vllm_generation.generator.set_state(states[4])
    resumed.train(str(tmp_path / "whole" / f"checkpoint-{stop}"))
    assert_same_run(whole, resumed)


def test_with_one_update_the_old_policy_is_the_engines_too(tmp_path):
    run = trainer_of(tmp_path, steps_per_generation=1, max_steps=2)
    run.train()
    assert not run.args.trust_region_idle
    lines = [line for line in run.state.log_history if "troll/policy_kl_max" in line]
    assert lines and all(line["troll/policy_kl_max"] < 1e-5 for line in lines)


def test_the_support_is_that_of_the_trainer(tmp_path):
    """With 19 likely tokens asked for, the sampled one first whatever its rank, trimmed by the mass."""
    run = trainer_of(tmp_path, max_steps=1)
    run.train()
    assert set(run.vllm_generation.asked) == {19} and run.support_size == 20
    for inputs in run._buffered_inputs:
        dense = with_dense(inputs, inputs[OLD_POLICY_KEY])
        ids, log_probs = dense["troll_old_token_ids"], dense["troll_old_log_probs"]
        assert torch.equal(
            ids[..., 0][inputs["completion_mask"].bool()],
            inputs["completion_ids"][inputs["completion_mask"].bool()].int(),
        )
        live = inputs["completion_mask"].bool()
        assert torch.allclose(log_probs[live].exp().sum(-1), torch.ones(int(live.sum())), atol=2e-6)


def test_equal_policies_do_not_diverge_by_the_floor_of_the_rest(tmp_path):
    """At the floor, KL(q‖p) was 1e-6 times what the policy's log-probability is below it."""
    model = tiny_model(spread=4000.0)  # the least likely tokens have e⁻⁵⁰⁰ and less
    options = {"trust_region": "mask", "divergence_type": "topk_kl", "support_size": V - 1, "max_steps": 1}
    run = trainer_of(tmp_path, model=model, learning_rate=0.0, **options)
    run.train()
    assert max(logged(run, "troll/divergence_max")) < 2e-5


def test_a_reference_with_the_policys_weights_moves_nothing(tmp_path):
    """RLOO's reward has the reference KL: of equal weights, its rounding was the only signal."""
    model = saved_model(tmp_path / "model")
    options = {"beta": 0.5, "reward": lambda completions, **_: [1.0] * len(completions), "max_steps": 4}
    run = trainer_of(tmp_path, "rloo", model=model, optim="adamw_torch", **options)
    start = weights(run)
    run.train()
    assert torch.equal(weights(run), start)


@pytest.mark.parametrize(("algorithm", "bad"), [("grpo", math.nan), ("rloo", None)])
def test_a_token_without_a_number_leaves_loss_and_counts(algorithm, bad, tmp_path):
    run = trainer_of(tmp_path, algorithm, max_steps=1, steps_per_generation=4)

    def spoil(listed):
        return [dict.fromkeys(listed[0], bad), *listed[1:]]  # the first token of every completion

    run.vllm_generation.spoil = spoil
    run.train()
    batch = run._buffered_inputs[0]
    assert not batch["tool_mask"][:, 0].any()
    line = run.state.log_history[0]
    assert line["troll/unscored_tokens"] == 32 and math.isfinite(line["grad_norm"]) and line["grad_norm"] > 0
    assert line["troll/skipped_updates"] == 0


def nothing_for(steps, run):
    """Have the engine score nothing in the rollout batches that are sampled at these steps."""

    def spoil(listed):
        unknown = run.state.global_step in steps
        return [dict.fromkeys(row, math.nan) for row in listed] if unknown else listed

    run.vllm_generation.spoil = spoil


@pytest.mark.parametrize(("algorithm", "mask"), [("grpo", {"trust_region": "mask"}), ("rloo", {})])
def test_a_rollout_batch_of_which_nothing_is_known_is_skipped_and_counted(algorithm, mask, tmp_path):
    """It ended the run. The two batches around it are trained on."""
    run = trainer_of(tmp_path, algorithm, steps_per_generation=2, max_steps=6, optim="adamw_torch", **mask)
    nothing_for({2}, run)
    moved = [weights(run)]
    run.add_callback(AfterEachStep(lambda: moved.append(weights(run))))
    run.train()
    still = [torch.equal(before, after) for before, after in itertools.pairwise(moved)]
    assert still == [False, False, True, True, False, False]
    assert logged(run, "troll/skipped_updates") == [0, 0, 1, 1, 0, 0]
    known, unknown, after = logged(run, "troll/unscored_tokens")  # of each rollout batch
    assert unknown > 0 and known == after == 0
    assert all(math.isfinite(value) for line in run.state.log_history for value in line.values() if value is not None)


def test_an_engine_that_never_scores_anything_stops_the_run(tmp_path):
    run = trainer_of(tmp_path, steps_per_generation=2, max_steps=20, max_skipped_updates=5)
    nothing_for(range(2, 20), run)
    with pytest.raises(FloatingPointError, match=r"update 7: 5 updates in a row.*vLLM's log-probabilities.*vLLM's log"):
        run.train()


def test_what_steps_in_the_backward_is_stopped_before_an_unknown_batch(tmp_path):
    """There nothing can be skipped any more."""
    run = trainer_of(tmp_path, steps_per_generation=2, max_steps=6)
    run.finite_guard._steps_in_backward = lambda: "`optim` lomo"
    nothing_for({2}, run)
    said = "Stopped before update 3, which `optim` lomo cannot skip. Not finite: vLLM's log-probabilities"
    with pytest.raises(FloatingPointError, match=said):
        run.train()


def test_one_unknown_token_that_is_all_there_is_does_not_stop_the_run(tmp_path):
    """An environment may leave a batch of one live token."""
    first = lambda rows: [[1] + [0] * (len(row) - 1) if n == 0 else [0] * len(row) for n, row in enumerate(rows)]

    def rollout(prompts, trainer):
        output = one_turn(lambda rows: rows)(prompts, trainer)
        return output | {"env_mask": first(output["completion_ids"])}

    run = trainer_of(tmp_path, rollout_func=rollout, max_steps=4)
    nothing_for(range(9), run)
    start = weights(run)
    run.train()
    assert torch.equal(weights(run), start) and sum(logged(run, "troll/unscored_tokens")) == 1
    assert sum(logged(run, "troll/skipped_updates")) == 4


def test_an_evaluation_of_which_nothing_is_known_does_not_stop_the_run(tmp_path):
    run = trainer_of(tmp_path, eval_strategy="steps", eval_steps=2, max_steps=4, num_generations_eval=2)
    nothing_for({2, 4}, run)  # the training samples at step 0
    run.train()
    assert logged(run, "troll/skipped_updates") == [0, 0, 0, 0]
    assert len(logged(run, "eval_reward")) == 2 and min(logged(run, "eval_troll/unscored_tokens")) > 0
    assert all(map(math.isfinite, logged(run, "eval_loss") + logged(run, "eval_reward")))


@pytest.mark.parametrize(("support_size", "zero"), [(102, -math.inf), (128, -9999.0)])
def test_a_head_with_rows_for_no_token(support_size, zero, tmp_path):
    """128 rows, 100 tokens: the engine has −∞ for the others, and from K = 102 on every token was unknown."""
    runs = []
    for name, size in (("whole", 101), ("more", support_size)):
        model = tiny_model(vocab_size=128)
        run = trainer_of(tmp_path / name, model=model, support_size=size, tail_mass=0.0, max_steps=3)
        logits = run.vllm_generation.logits

        def masked(*given, logits=logits):
            return [torch.cat([each[:, :V], torch.full_like(each[:, V:], -math.inf)], 1) for each in logits(*given)]

        run.vllm_generation.logits = masked
        run.vllm_generation.spoil = lambda listed: [{i: max(x, zero) for i, x in row.items()} for row in listed]
        start = weights(run)
        run.train()
        assert set(logged(run, "troll/unscored_tokens")) == {0} and set(logged(run, "troll/skipped_updates")) == {0}
        assert logged(run, "troll/support_size_mean") == [pytest.approx(100)] * 3
        runs.append(run)
    assert torch.equal(weights(runs[0]), weights(runs[1])) and not torch.equal(weights(runs[0]), start)


@pytest.mark.parametrize(("options", "said"), [
    ({"use_vllm": False}, "needs vLLM"),
    ({"vllm_importance_sampling_correction": True}, "nothing is left to correct"),
    ({"top_p": 0.9}, "top_p=0.9"),
    ({"generation_kwargs": {"frequency_penalty": 0.5}}, "frequency_penalty"),
    ({"vllm_structured_outputs_regex": "a*"}, "vllm_structured_outputs_regex"),
    ({"old_policy": "vllm"}, "must be 'trainer' or 'engine'"),
])  # fmt: skip
def test_what_an_engine_cannot_honour_is_refused(options, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        TrollGRPOConfig(str(tmp_path), **{"use_vllm": True, "old_policy": "engine", "bf16": False, **options})
    assert TrollGRPOConfig(str(tmp_path), bf16=False).vllm_importance_sampling_correction is True


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_a_trl_that_scores_the_reference_first_trains_the_same_weights(algorithm, tmp_path, monkeypatch):
    """The engine's numbers answer for the policy alone."""
    trainer = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}[algorithm]
    options = {**WHOLE, "model": saved_model(tmp_path / "model"), "beta": 0.3}
    expected = trainer_of(tmp_path / "expected", algorithm, **options)
    start = weights(expected)
    expected.train()
    score_reference_first(monkeypatch, trainer)
    run = trainer_of(tmp_path / "run", algorithm, **options)
    run.train()
    assert_same_weights(expected, run, start)
