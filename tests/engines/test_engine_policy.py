"""`old_policy: engine`: the old policy is what an engine answered while it sampled. The engine here is the model."""

import math

import pytest
import torch
import trl.trainer.grpo_trainer
import trl.trainer.rloo_trainer
from peft import LoraConfig

from tests.tiny import padded_logits, sample_tokens, saved_model, tiny_model
from tests.trl.reference_loss import projection, reference_loss
from tests.trl.test_compatibility import moe
from tests.trl.test_compatibility_models import llava, llava_processor, pictures
from tests.trl.test_compatibility_rollouts import byte_tokenizer, chats, multiply
from tests.trl_comparison import OURS, logged, make_trainer, micro_batch
from tests.trl_comparison import weights as weights_by_name
from troll_trl import TrollGRPOConfig
from troll_trl.trainers import troll_trainer

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


def numbers_of(trainer, prompts):
    """As a rollout function gets them: completions, and the log-probability of every token."""
    _, completions, log_probs, _ = trainer.vllm_generation.generate(prompts)
    return completions, [[value for (value,) in row] for row in log_probs]


def one_turn(change):
    """A rollout function of one turn; `change` its log-probabilities."""

    def rollout(prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions, numbers = numbers_of(trainer, prompt_ids)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": change(numbers)}

    return rollout


WHOLE = {"support_size": V, "tail_mass": 0.0}
# The engine scores images row by row
IMAGES = {"support_size": 101, "make_model": llava, "make_tokenizer": llava_processor, "dataset": pictures()}
IMAGES |= {"max_steps": 3, "max_completion_length": 4}


@pytest.mark.parametrize(("algorithm", "options"), [
    ("grpo", {**WHOLE, "mask_truncated_completions": True}),
    ("grpo", {**WHOLE, "steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 2}),
    ("grpo", {"trust_region": "mask", "divergence_bound": 0.05}),
    ("grpo", {"trust_region": "penalty", "kl_bound": 1e-4, "regression_coef": 10.0}),
    ("grpo", {**WHOLE, "trust_region": "penalty", "divergence_type": "topk_kl", "regression_coef": 10.0}),
    ("grpo", {**WHOLE, "off_policy_mask_threshold": 0.01}),
    ("grpo", {**WHOLE, "beta": 0.1, "use_bias_correction_kl": True}),
    ("grpo", {**WHOLE, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "down_proj"]), "learning_rate": 3.0}),
    ("grpo", {**WHOLE, "eval_strategy": "steps", "eval_steps": 3, "num_generations_eval": 2}),
    pytest.param("grpo", {**WHOLE, "make_model": moe}, marks=pytest.mark.slow),
    ("grpo", {**WHOLE, "rollout_func": one_turn(lambda rows: rows)}),
    ("grpo", IMAGES),
    ("rloo", WHOLE),
])  # fmt: skip
def test_an_engine_with_the_trainers_numbers_trains_its_weights(algorithm, options, tmp_path):
    runs, options = [], {"make_model": lambda: saved_model(tmp_path / "model"), **options}
    makers = {name: options.pop(f"make_{name}") for name in ("model", "tokenizer") if f"make_{name}" in options}
    for old in ("trainer", "engine"):
        made = {name: make() for name, make in makers.items()}
        runs.append(trainer_of(tmp_path / old, algorithm, old, **made, **options))
        start = weights(runs[-1])
        runs[-1].train()
    assert_same_weights(*runs, start)


def assert_same_weights(trainer_run, engine_run, start):
    moved = (weights(trainer_run) - start).abs().max().item()
    assert moved > 1e-3
    assert (weights(trainer_run) - weights(engine_run)).abs().max().item() < 1e-4 * moved


def test_a_rollout_function_without_the_engines_numbers_is_refused(tmp_path):
    plain = one_turn(lambda rows: [list(map(float, row)) for row in rows])
    with pytest.raises(ValueError, match="Give a `SampledLogProb`"):
        trainer_of(tmp_path, rollout_func=plain).train()
    with pytest.raises(ValueError, match="returned no `logprobs`"):
        trainer_of(tmp_path, rollout_func=one_turn(lambda rows: None)).train()
    mask = {"trust_region": "mask", "divergence_bound": 0.05}
    trainer_of(tmp_path, rollout_func=plain, max_steps=1, **mask).train()  # reads the sampled token alone


def test_one_more_result_of_the_engine_is_passed_on(tmp_path, monkeypatch):
    """As TRL after 1.16 may have it. Four results were unpacked, and a fifth ended the run."""
    monkeypatch.setattr(
        Engine, "generate", lambda *args, answer=Engine.generate, **kwargs: (*answer(*args, **kwargs), 5)
    )
    run, passed = trainer_of(tmp_path, max_steps=2), []

    def as_trl_unpacks(*args, generate=run.vllm_generation.generate, **kwargs):
        *four, more = generate(*args, **kwargs)
        passed.append(more)
        return four

    run.vllm_generation.generate = as_trl_unpacks
    run.train()
    assert passed == [5] and max(logged(run, "troll/unscored_tokens")) == 0


def test_tools(tmp_path):
    """A call and what follows its answer are two answers of the engine, with the tool's words in between."""
    runs, size = [], len(byte_tokenizer())
    options = {"support_size": size, "tail_mass": 0.0, "max_completion_length": 256, "max_tool_calling_iterations": 1}
    options |= {"tools": [multiply], "dataset": chats(), "steps_per_generation": 2, "max_steps": 2}
    for old in ("trainer", "engine"):
        tokenizer = byte_tokenizer()
        model = tiny_model(vocab_size=size, pad_token_id=0, eos_token_id=2)
        run = trainer_of(tmp_path / old, old_policy=old, model=model, tokenizer=tokenizer, **options)
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


@pytest.mark.parametrize("options", [{}, {"trust_region": "mask"}])
def test_misaligned_numbers_of_a_rollout_function_are_refused(options, tmp_path):
    """They trained, in silence, with the probabilities of other tokens."""
    run = trainer_of(tmp_path, rollout_func=one_turn(lambda rows: [[*row[1:], row[0]] for row in rows]), **options)
    run.vllm_generation.length = lambda number: 3 + number // 8
    with pytest.raises(ValueError, match="misaligned"):
        run.train()


@pytest.mark.parametrize(("support_size", "bound"), [(2, 1e-5), (20, 1e-4), (V, 1e-4)])
def test_the_loss_is_that_of_a_float64_reference(support_size, bound, tmp_path):
    """With a rest of the engine's rounding, of a few tokens and of most."""
    options = {"support_size": support_size, "tail_mass": 0.0, "kl_bound": bound, "loss_type": "grpo"}
    trainer = trainer_of(tmp_path, **options, max_steps=3)
    trainer.train()
    inputs = micro_batch(trainer, 3)
    assert_loss_is(reference_loss(trainer, inputs, projection(bound), tiny_model), trainer, inputs)


def assert_loss_is(reference, trainer, inputs):
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    assert (reference.regression > 0).sum() > 5
    assert loss.item() == pytest.approx(reference.loss, rel=1e-3, abs=1e-5)
    largest = max(gradient.abs().max() for gradient in reference.gradients.values())
    for name, parameter in trainer.model.named_parameters():
        assert (parameter.grad - reference.gradients[name]).abs().max() < 2e-3 * largest, name


def test_unknown_tokens_and_a_large_tail_in_a_mean_over_all_tokens(tmp_path):
    """Against an old policy made anew from the weights that sampled, and tokens counted anew."""
    tail, bound, size = 0.8, 1e-4, 20
    options = {"support_size": size, "tail_mass": tail, "kl_bound": bound, "loss_type": "dapo", "max_steps": 3}
    trainer = trainer_of(tmp_path, **options)
    trainer.vllm_generation.spoil = lambda listed: [dict.fromkeys(listed[0], math.nan), *listed[1:]]
    trainer.train()
    live = [(x["completion_mask"] * x["tool_mask"]).bool() for x in trainer._buffered_inputs]
    assert not any(mask[:, 0].any() for mask in live) and all(mask.any() for mask in live)

    inputs, kept = micro_batch(trainer, 3), []
    ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    length = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        full = tiny_model().double()(ids, attention_mask=mask).logits[:, -length - 1 : -1].log_softmax(-1)  # (B, C, V)
    anew = {"old_token_ids": torch.full((*full.shape[:2], size), -1)}
    anew["old_sparse_logps"] = torch.full((*full.shape[:2], size + 1), -math.inf, dtype=torch.float64)
    for b, t in live[3].nonzero().tolist():
        token, q = inputs["completion_ids"][b, t].item(), full[b, t]
        order = [token, *(i for i in q.argsort(descending=True).tolist() if i != token)][:size]
        before = [0.0, *q[order].exp().cumsum(0).tolist()]
        support = [i for i, mass in zip(order, before, strict=False) if mass < 1 - tail]
        rest = [i for i in range(V) if i not in support]
        anew["old_token_ids"][b, t, : len(support)] = torch.tensor(support)
        anew["old_sparse_logps"][b, t, : len(support)] = q[support]
        anew["old_sparse_logps"][b, t, -1] = q[rest].logsumexp(0)
        kept.append(len(support))
    assert 1 < sum(kept) / len(kept) < size
    anew["num_items_in_batch"] = sum(mask.sum() for mask in live)
    reference = reference_loss(trainer, inputs | anew, projection(bound), tiny_model)
    assert_loss_is(reference, trainer, inputs)


def test_with_one_update_the_old_policy_is_the_engines_too(tmp_path):
    """With 19 likely tokens asked for, trimmed by the mass: what is dropped joins the rest."""
    run = trainer_of(tmp_path, steps_per_generation=1, max_steps=2)
    run.train()
    assert set(run.vllm_generation.asked) == {19} and max(logged(run, "troll/policy_kl_max")) < 1e-5
    [batch] = run._buffered_inputs
    live = batch["completion_mask"].bool()
    assert torch.equal(batch["old_token_ids"][live][:, 0], batch["completion_ids"][live].int())
    mass = batch["old_sparse_logps"][live].exp().sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=2e-6)


def test_a_reference_with_the_policys_weights_moves_nothing(tmp_path):
    """RLOO's reward has the reference KL: of equal weights, its rounding was the only signal."""
    model = saved_model(tmp_path / "model")
    options = {"beta": 0.5, "reward": lambda completions, **_: [1.0] * len(completions), "max_steps": 4}
    run = trainer_of(tmp_path, "rloo", model=model, optim="adamw_torch", **options)
    start = weights(run)
    run.train()
    assert torch.equal(weights(run), start)


def test_an_unknown_token_adds_nothing_to_the_kl_in_rloos_reward():
    """TRL gets 0 for its old policy, and subtracts the reference."""
    rollout = troll_trainer._Rollout(False, torch.tensor([[math.nan, -1.0]]))
    score = lambda model: (torch.tensor([[-2.0, -3.0]]), None)
    reference, _ = troll_trainer.TrollTrainer._score_reference(None, score, None, rollout)
    assert reference.tolist() == [[0.0, -3.0]]


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


@pytest.mark.parametrize(("options", "said"), [
    ({"use_vllm": False}, "needs vLLM"),
    ({"vllm_importance_sampling_correction": True}, "nothing is left to correct"),
    ({"top_p": 0.9}, "top_p=0.9"),
    ({"generation_kwargs": {"logit_bias": {3: 1.0}}}, "logit_bias"),
    ({"generation_kwargs": {"new_in_vllm": 1}}, "new_in_vllm"),
    ({"vllm_structured_outputs_regex": "a*"}, "vllm_structured_outputs_regex"),
    ({"old_policy": "vllm"}, "must be 'trainer' or 'engine'"),
])  # fmt: skip
def test_what_an_engine_cannot_honour_is_refused(options, said, tmp_path):
    config = {"output_dir": str(tmp_path), "use_vllm": True, "old_policy": "engine", "bf16": False}
    with pytest.raises(ValueError, match=said):
        TrollGRPOConfig(**config | options)
    TrollGRPOConfig(**config, generation_kwargs={"seed": 3, "stop": ["b"], "top_p": 1.0})
    assert TrollGRPOConfig(str(tmp_path), bf16=False).vllm_importance_sampling_correction is True
