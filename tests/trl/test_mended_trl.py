"""What stock TRL does wrong in silence is mended, or named, in TROLL's trainers and in the command's clip."""

import math
from types import SimpleNamespace

import pytest
import torch
import trl.trainer.grpo_trainer
import trl.trainer.rloo_trainer
from peft import LoraConfig
from tokenizers.processors import TemplateProcessing
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.support.thoughts import thinking_tokenizer
from tests.tiny import saved_model, tiny_model, tiny_prompts, tiny_tokenizer
from tests.trl_comparison import OURS, make_trainer
from troll_trl.trainers.clip import ClipGRPOTrainer, ClipRLOOTrainer
from troll_trl.trainers.mended_trl import in_equal_groups

STOCK = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
MENDED = {f"troll {name}": classes for name, classes in OURS.items()}
MENDED |= {"clip grpo": (ClipGRPOTrainer, GRPOConfig), "clip rloo": (ClipRLOOTrainer, RLOOConfig)}


# -- Equal rewards ----------------------------------------------------------------------------------------------------


def advantages(classes, folder, rewards, **options):
    """The advantages of a rollout batch whose completions have the `rewards`, `(functions, n)` with None or NaN."""
    functions = [lambda own=own, **_: list(own) for own in rewards]
    options = {"per_device_train_batch_size": len(rewards[0]), "steps_per_generation": 1, "beta": 0.0} | options
    trainer = make_trainer(*classes, folder, reward=functions, **options)
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(2)  # away from a reference
    rows = [{"prompt": "w1 w2"}] * len(rewards[0])
    return trainer._generate_and_score_completions(rows)["advantages"]


EQUAL = [[[reward] * 16] for reward in (0.1, 0.2, 0.35, 0.7)]
EQUAL += [[[0.35] * 8 + [0.1] * 8], [[0.35] * 8 + [0.1] * 8, [0.7] * 16], [[0.35] * 7 + [None] + [0.1] * 8] * 2]
SETTINGS = [
    *[("grpo", {"scale_rewards": scale}) for scale in ("group", "batch", "none")],
    ("grpo", {"multi_objective_aggregation": "normalize_then_sum"}),
    *[("rloo", {"normalize_advantages": normalize}) for normalize in (True, False)],
]


@pytest.mark.parametrize(("algorithm", "options"), SETTINGS)
@pytest.mark.parametrize("method", ["troll", "clip"])
def test_equal_rewards_have_no_advantage(method, algorithm, options, tmp_path):
    """Their advantages were rounding, of 7e-5 to 6e-4 and, with `normalize_then_sum`, of 1.2."""
    classes = MENDED[f"{method} {algorithm}"]
    for rewards in EQUAL:
        assert advantages(classes, tmp_path, rewards, num_generations=8, **options).tolist() == [0.0] * 16


@pytest.mark.parametrize(("algorithm", "options"), SETTINGS)
def test_the_advantages_of_other_groups_are_trls(algorithm, options, tmp_path):
    """The first group is equal. The second one differs in one function, or in where a function applies."""
    for others in (
        [[0.0, 1.0, 0.3, 0.3], [0.1] * 4],
        [[1.0, 0.0, None, None], [0.7] * 4],
        [[0.1] * 3 + [0.11], [None] * 4],
    ):
        rewards = [[0.35] * 4 + own for own in others]
        found = advantages(MENDED[f"troll {algorithm}"], tmp_path, rewards, num_generations=4, **options)
        torch.manual_seed(0)
        expected = advantages(STOCK[algorithm], tmp_path, rewards, num_generations=4, **options)
        assert found[:4].tolist() == [0.0] * 4 and torch.equal(found[4:], expected[4:]) and found[4:].any()


def test_a_function_of_no_weight_makes_no_difference(tmp_path):
    rewards = [[0.35] * 8, [*map(float, range(8))]]
    found = lambda *weights: advantages(OURS["grpo"], tmp_path, rewards, reward_weights=[*weights], num_generations=8)
    assert not found(1.0, 0.0).any() and found(1.0, 1.0).all()


def test_a_bad_reward_wins_and_a_kl_in_the_reward_stays(tmp_path):
    assert advantages(OURS["grpo"], tmp_path, [[0.35] * 7 + [math.nan]]).isnan().all()
    model = saved_model(tmp_path / "model")
    options = {"model": model, "beta": 0.5, "num_generations": 8}
    grpo, rloo = (advantages(OURS[name], tmp_path, [[0.35] * 8], **options) for name in OURS)
    assert not grpo.any() and rloo.all()


def test_a_subclass_that_shapes_rewards_keeps_its_signal(tmp_path):
    class Shaped(OURS["grpo"][0]):
        def _calculate_rewards(self, *args):
            return super()._calculate_rewards(*args) + torch.arange(8.0).unsqueeze(1)

    assert advantages((Shaped, OURS["grpo"][1]), tmp_path, [[0.35] * 8]).all()


@pytest.mark.parametrize("method", ["troll", "clip"])
def test_a_reward_that_is_missing_for_one_completion_is_no_difference(method, tmp_path):
    """Such as a lost verifier's among wrong answers: with `normalize_then_sum`, rounding gave advantages of 0.6."""
    rewards, options = [[0.35] * 7 + [0.7] * 7, ([None] + [0.2] * 6) * 2], {"num_generations": 7}
    by_function = options | {"multi_objective_aggregation": "normalize_then_sum"}
    assert not advantages(MENDED[f"{method} grpo"], tmp_path, rewards, **by_function).any()
    assert advantages(MENDED[f"{method} grpo"], tmp_path, rewards, **options).all()  # the sums differ
    assert not advantages(MENDED[f"{method} grpo"], tmp_path, [rewards[0], ([None] + [0.0] * 6) * 2], **options).any()


def test_equal_sums_have_no_advantage_unless_functions_are_normalized_one_by_one(tmp_path):
    rewards = [[0.1, 0.3] * 3 + [0.1], [0.15, 0.05] * 3 + [0.15]]
    options = {"num_generations": 7, "reward_weights": [1.0, 2.0]}
    assert not advantages(OURS["grpo"], tmp_path, rewards, **options).any()
    options["multi_objective_aggregation"] = "normalize_then_sum"
    assert advantages(OURS["grpo"], tmp_path, rewards, **options).all()


def test_groups_are_equal_column_by_column():
    nan = math.nan
    rows = [[1, 2], [1, 2], [1, 2], [1, 3], [nan, 2], [nan, 2], [nan, 2], [1, 3], [nan, nan], [1, 2], *[[nan, nan]] * 2]
    assert in_equal_groups(torch.tensor(rows), 2)[::2].tolist() == [True, False, True, False, True, True]


# -- Fresh samples ----------------------------------------------------------------------------------------------------


class Engine:
    """In place of TRL's `VLLMGeneration`: records whether the weights that it samples with are the model's."""

    mode = "colocate"

    def __init__(self, model, **_):
        self.model, self.weights, self.fresh = model, None, []

    def sync_weights(self):
        self.weights = [parameter.detach().clone() for parameter in self.model.parameters()]

    def generate(self, prompts, **_):
        self.fresh.append(all(map(torch.equal, self.weights, self.model.parameters())))
        completions = [[5 + n % 3, 6, 1] for n in range(len(prompts))]
        return prompts, completions, [[[-1.0]] * 3] * len(prompts), None


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setattr(trl.trainer.grpo_trainer, "VLLMGeneration", Engine)
    monkeypatch.setattr(trl.trainer.rloo_trainer, "VLLMGeneration", Engine)

    def make(kind, **options):
        def reward(completion_ids, trainer_state, **_):  # the best evaluation is the first
            return [-float(trainer_state.global_step) + ids[0] for ids in completion_ids]

        options = {"use_vllm": True, "vllm_mode": "colocate", "max_steps": 2, "beta": 0.0, "reward": reward, **options}
        return make_trainer(*MENDED[kind], tmp_path, eval_dataset=tiny_prompts(2), **options)

    return make


@pytest.mark.parametrize("kind", MENDED)
def test_no_sample_is_of_weights_that_are_gone(kind, run):
    """TRL compares the numbers of steps alone: it sampled with the last weights in place of the best."""
    best = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    trainer = run(kind, **best)

    class Evaluate(TrainerCallback):
        def on_train_end(self, *args, **kwargs):
            trainer.evaluate()

    trainer.add_callback(Evaluate())
    trainer.train()
    assert trainer.state.best_global_step == 1
    trainer.evaluate()
    with torch.no_grad():
        for change in (trainer.evaluate, lambda: trainer.predict(tiny_prompts(2))):
            next(trainer.model.parameters()).mul_(2)
            change()
    assert len(trainer.vllm_generation.fresh) > 5 and all(trainer.vllm_generation.fresh)


@pytest.mark.parametrize("kind", MENDED)
def test_a_second_training_samples_with_its_own_start(kind, run):
    """With one rollout batch, TRL sampled with the weights before the first training: both begin at step 0."""
    trainer = run(kind, steps_per_generation=4, max_steps=4)
    trainer.train()
    trainer.train()
    assert trainer.vllm_generation.fresh == [True] * 2


@pytest.mark.parametrize("kind", MENDED)
def test_a_second_training_begins_with_fresh_samples(kind, tmp_path):
    """It continued the rollout batch in which the first one had ended."""
    events = []

    class Steps(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            events.append("step")

    def reward(completion_ids, **_):
        events.append("generation")
        return [float(ids[0]) for ids in completion_ids]

    trainer = make_trainer(*MENDED[kind], tmp_path, reward=reward, max_steps=3, beta=0.0)  # of 4 in a rollout batch
    trainer.add_callback(Steps())
    trainer.train()
    first = events.copy()
    assert sorted(first) == ["generation", "step", "step", "step"]
    trainer.train()
    assert events == first * 2


# -- Warnings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MENDED)
def test_weights_in_16_bits_are_named(kind, tmp_path, caplog):
    """At 1e-6, 2 % of them changed in 16 updates."""
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    for dtype, options, quantized, warns in (
        (torch.bfloat16, {}, False, 1),
        (torch.float32, {}, False, 0),
        (torch.bfloat16, {"peft_config": lora}, False, 0),
        (torch.bfloat16, {"peft_config": lora}, True, 0),
    ):
        caplog.clear()
        model = tiny_model().to(dtype)
        if quantized:  # as bitsandbytes marks a model, of which TRL trains the adapter in bfloat16
            model.is_quantized = model.is_loaded_in_4bit = True
            model.hf_quantizer = SimpleNamespace(is_trainable=True)
        trainer = make_trainer(*MENDED[kind], tmp_path, model=model, beta=0.0, **options)
        assert caplog.text.count("Trained weights are torch.bfloat16") == warns
        trained = {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad}
        assert trained == {torch.bfloat16 if warns or quantized else torch.float32}


@pytest.mark.parametrize("kind", MENDED)
def test_prompts_that_end_in_eos_are_named(kind, tmp_path, caplog):
    for adds, dataset, warns in ((True, None, 1), (False, None, 0), (True, chats(), 0)):
        caplog.clear()
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = thinking_tokenizer().chat_template
        if adds:
            end = [("<eos>", tokenizer.eos_token_id)]
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=end)
        make_trainer(*MENDED[kind], tmp_path, tokenizer=tokenizer, dataset=dataset, beta=0.0, max_steps=1).train()
        assert caplog.text.count("The tokenizer ends every prompt in '<eos>'") == warns


def chats():
    return tiny_prompts().map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
