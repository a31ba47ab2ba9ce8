"""
The examples of TRL's documentation of GRPO and RLOO that need no hub, with two lines changed: the import, and the
updates per rollout batch. Their models and data are small ones in the working folder, their settings for a CPU.
"""

import difflib
import json

import datasets
import pytest
from test_compatibility_rollouts import byte_tokenizer
from tiny import saved_model, tiny_config, tiny_model, tiny_tokenizer
from transformers import Qwen3ForSequenceClassification

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}w0{% endif %}"
)
GRPO_IMPORT = "from trl import GRPOConfig, GRPOTrainer"
RLOO_IMPORT = "from trl import RLOOConfig, RLOOTrainer"
SWAPS = {
    GRPO_IMPORT: "from troll_trl import TrollGRPOConfig as GRPOConfig, TrollGRPOTrainer as GRPOTrainer",
    RLOO_IMPORT: "from troll_trl import TrollRLOOConfig as RLOOConfig, TrollRLOOTrainer as RLOOTrainer",
    "**options)": "**options, steps_per_generation=2)",
}
# For a CPU, and so short and so fast that the second update of a rollout batch is projected
OPTIONS = {
    "output_dir": "out",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": 2,
    "learning_rate": 1e-2,
}

# The end of an example, where TRL's documentation has `trainer = GRPOTrainer(reward_funcs=reward_func, ...)`
TRAIN = """
from datasets import load_dataset
dataset = load_dataset("json", data_files="{data}.jsonl", split="train")
trainer = GRPOTrainer(
    model="{model}", reward_funcs={rewards}, args=GRPOConfig(**options), train_dataset=dataset, {more}
)
trainer.train()
"""


def example(start, rewards="reward_func", data="texts", model="model", more="", trainer=GRPO_IMPORT):
    end = TRAIN.format(rewards=rewards, data=data, model=model, more=more)
    return f"{trainer}\n{start}\n{end.replace('GRPO', 'RLOO') if trainer == RLOO_IMPORT else end}"


ACCURACY = "from trl.rewards import accuracy_reward"
LENGTH = """
def reward_func(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]
"""
ENVIRONMENT = '''
class Environment:
    def reset(self, **kwargs):
        self.count = 0
        return "Count."

    def add(self, amount: int) -> str:
        """
        Adds to the count.

        Args:
            amount: What to add.

        Returns:
            The count.
        """
        self.count += amount
        return str(self.count)

def reward_func(environments, completion_ids, **kwargs):
    return [env.count + sum(ids) % 7 for env, ids in zip(environments, completion_ids, strict=True)]
'''
EXAMPLES = {
    "quick_start": example(ACCURACY, "accuracy_reward", "chats"),
    "rloo_quick_start": example(LENGTH, trainer=RLOO_IMPORT),
    "reward_model": example("", '"reward_model"'),
    "tools": example(
        f'''
def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b
{LENGTH}''',
        data="chats",
        model="agent",
        more="tools=[multiply]",
    ),
    "environment": example(ENVIRONMENT, data="chats", model="agent", more="environment_factory=Environment"),
    "adapter": example(
        f"from peft import LoraConfig\n{LENGTH}", more='peft_config=LoraConfig(target_modules=["q_proj", "v_proj"])'
    ),
    "streamed_data": example(LENGTH).replace('split="train"', 'split="train", streaming=True'),
    "reference_kl": example(f'{LENGTH}\noptions |= {{"beta": 0.04, "num_iterations": 2}}'),
    # Settings of TRL's index of papers
    "dapo": example(
        """
from trl.rewards import get_soft_overlong_punishment
options |= {"loss_type": "dapo", "mask_truncated_completions": False}
"""
        + LENGTH,
        "[reward_func, get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4)]",
    ),
    "dr_grpo": example(f'{LENGTH}\noptions |= {{"scale_rewards": False, "loss_type": "dr_grpo"}}'),
    "gspo": example(f'{LENGTH}\noptions |= {{"importance_sampling_level": "sequence", "loss_type": "grpo"}}'),
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with the data and the models of all examples."""
    folder = tmp_path_factory.mktemp("examples")
    texts = [{"prompt": f"w{n} w5", "ground_truth": f"w{n}", "task": "coding" if n % 2 else "math"} for n in range(16)]
    chats = [{"prompt": [{"role": "user", "content": f"w{n} w5"}], "solution": str(n)} for n in range(16)]
    for name, rows in (("texts", texts), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saved_model(folder / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    Qwen3ForSequenceClassification(tiny_config(num_labels=1)).save_pretrained(folder / "reward_model")
    tiny_tokenizer().save_pretrained(folder / "reward_model")
    agent = byte_tokenizer()
    tiny_model(vocab_size=len(agent), pad_token_id=0, eos_token_id=2).save_pretrained(folder / "agent")
    agent.save_pretrained(folder / "agent")
    return folder


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_with_two_lines_changed(name, workplace, tmp_path, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    text = EXAMPLES[name]
    for old, new in SWAPS.items():
        text = text.replace(old, new)
    changed = [line for line in difflib.ndiff(EXAMPLES[name].splitlines(), text.splitlines()) if line.startswith("+")]
    assert len(changed) == 2

    names = {"options": OPTIONS | {"output_dir": str(tmp_path)}}
    exec(compile(text, name, "exec"), names)
    lines = [line for line in names["trainer"].state.log_history if "loss" in line]
    assert len(lines) == 2
    assert lines[0]["troll/projected_fraction"] == 0, "the weights of the rollout"
    if name != "quick_start":  # in which no random answer is right, and nothing moves
        assert lines[1]["troll/policy_kl_max"] > 0 < lines[0]["grad_norm"]
