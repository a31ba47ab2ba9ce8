"""`old_policy: engine`: the old policy is what an engine answered while it sampled. The engine here is the model."""

import math

import pytest
import torch
import trl.trainer.grpo_trainer
import trl.trainer.rloo_trainer
from peft import LoraConfig
from reference_loss import projection, reference_loss
from test_compatibility import moe
from test_compatibility_models import llava, llava_processor, pictures, qwen_vl, qwen_vl_processor
from test_compatibility_rollouts import byte_tokenizer, chats, multiply
from tiny import padded_logits, sample_tokens, saved_model, tiny_model
from trl_comparison import OURS, logged, make_trainer, micro_batch
from trl_comparison import weights as weights_by_name

from troll_trl import TrollGRPOConfig

V = 100
SGD = {"optim": "sgd", "learning_rate": 0.3}


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
BINARY_PENALTY = {"trust_region": "penalty", "kl_bound": 1e-4, "regression_coef": 10.0}
# The engine scores images row by row
IMAGES = {"support_size": 101, "make_model": llava, "make_tokenizer": llava_processor, "dataset": pictures()}
IMAGES |= {"max_steps": 3, "max_completion_length": 4}


@pytest.mark.parametrize(("algorithm", "options"), [
    ("grpo", {**WHOLE, "mask_truncated_completions": True}),
    ("grpo", {**WHOLE, "steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 2}),
    ("grpo", {"trust_region": "mask", "divergence_bound": 0.05}),
    ("grpo", BINARY_PENALTY),
    ("grpo", {**WHOLE, "trust_region": "penalty", "divergence_type": "topk_kl", "regression_coef": 10.0}),
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
    with pytest.raises(ValueError, match="Give a `SampledLogProb`"):
        trainer_of(tmp_path, rollout_func=plain).train()
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
        kept = (inputs["old_token_ids"][..., 1:] >= 0).any(-1)
        assert trained < inputs["completion_mask"].sum() and kept.sum() == trained


@pytest.mark.parametrize("mask", [{}, {"trust_region": "mask"}, {"support_size": 1}])
def test_misaligned_numbers_of_a_rollout_function_are_refused(mask, tmp_path):
    """They trained, in silence, with the probabilities of other tokens."""
    run = trainer_of(tmp_path, rollout_func=one_turn(lambda rows: [[*row[1:], row[0]] for row in rows]), **mask)
    run.vllm_generation.length = lambda number: 3 + number // 8
    with pytest.raises(ValueError, match=r"`logprobs` of completion \d+ are misaligned: \d+ of \d+ numbers"):
        run.train()


@pytest.mark.parametrize(("support_size", "bound"), [(2, 1e-5), (20, 1e-4), (V, 1e-4)])
def test_the_loss_is_that_of_a_float64_reference(support_size, bound, tmp_path):
    """With a rest of the engine's rounding, of a few tokens and of most."""
    options = {"support_size": support_size, "tail_mass": 0.0, "kl_bound": bound, "loss_type": "grpo"}
    trainer = trainer_of(tmp_path, **options, max_steps=3)
    trainer.train()
    inputs = micro_batch(trainer, 3)
    trainer.model.train()
    reference = reference_loss(trainer, inputs, projection(bound), tiny_model)
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    assert (reference.regression > 0).sum() > 5
    assert loss.item() == pytest.approx(reference.loss, rel=1e-3, abs=1e-5)
    largest = max(gradient.abs().max() for gradient in reference.gradients.values())
    for name, parameter in trainer.model.named_parameters():
        assert (parameter.grad - reference.gradients[name]).abs().max() < 2e-3 * largest, name


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
        ids, log_probs = inputs["old_token_ids"], inputs["old_sparse_logps"]
        assert torch.equal(
            ids[..., 0][inputs["completion_mask"].bool()],
            inputs["completion_ids"][inputs["completion_mask"].bool()].int(),
        )
        live = inputs["completion_mask"].bool()
        assert torch.allclose(log_probs[live].exp().sum(-1), torch.ones(int(live.sum())), atol=2e-6)


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
        assert set(logged(run, "troll/unscored_tokens")) == {0}
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
