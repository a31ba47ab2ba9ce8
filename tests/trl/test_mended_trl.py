"""What stock TRL does wrong in silence is mended, or named, in TROLL's trainers and in the command's clip."""

import math

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


def test_groups_are_equal_function_by_function():
    nan = math.nan
    rows = [[1, 2], [1, 2], [1, 2], [1, 3], [nan, 2], [nan, 2], [nan, 2], [1, 2], [nan, nan], [1, 2], *[[nan, nan]] * 2]
    rows += [[nan, 2], [0, 2]]
    assert in_equal_groups(torch.tensor(rows), 2)[::2].tolist() == [True, False, True, False, True, False, False]


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
    trainer.train()  # from step 0 again, whose samples were of the weights before the first training
    with torch.no_grad():
        for change in (trainer.evaluate, lambda: trainer.predict(tiny_prompts(2))):
            next(trainer.model.parameters()).mul_(2)
            change()
    assert len(trainer.vllm_generation.fresh) >= 9 and all(trainer.vllm_generation.fresh)


@pytest.mark.parametrize("kind", MENDED)
def test_a_second_training_samples_its_own_weights(kind, run):
    """Both generate at step 0, and without an evaluation in between."""
    trainer = run(kind, steps_per_generation=2)
    trainer.train()
    trainer.train()
    assert trainer.vllm_generation.fresh == [True, True]


# -- Warnings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MENDED)
def test_weights_in_16_bits_are_named(kind, tmp_path, caplog):
    """At 1e-6, 2 % of them changed in 16 updates."""
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    for dtype, options, warns in (
        (torch.bfloat16, {}, 1),
        (torch.float32, {}, 0),
        (torch.bfloat16, {"peft_config": lora}, 0),
    ):
        caplog.clear()
        make_trainer(*MENDED[kind], tmp_path, model=tiny_model().to(dtype), beta=0.0, **options)
        assert caplog.text.count("Trained weights are torch.bfloat16") == warns


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
