"""Print the versions for a bug report, and check a new machine, model or TRL version: kernels, LM head and loss."""

import io
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from typing import Any

from troll_trl import __version__
from troll_trl.cli.command_line import CommandParser, stop

# Largest difference of a weight after the compared runs, as a share of the largest movement
_LOSS_TOLERANCE = 2e-3
_UPDATES = 4


def main(argv: Sequence[str] | None = None, program: str = "troll check") -> None:
    """Print versions, run the checks, and print a line for each. End with code 1 if any fails."""
    parser = CommandParser(prog=program, description=__doc__)
    parser.add_argument("--model", help="model whose LM head is checked: a folder or a hub name (default: a small one)")
    dtypes = ["auto", "bfloat16", "float16", "float32"]
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="dtype of the loaded model (default: auto)")
    options = parser.parse_args(argv)
    try:
        model = load_model(options.model, options.dtype)
    except (ValueError, OSError) as error:
        stop(program, error)
    print_versions()
    failed = False
    for name, check in (("kernels", check_kernels), ("head", lambda: check_model(model)), ("loss", check_loss)):
        ok, detail = check()
        failed |= not ok
        print(f"{name:<8} {'ok' if ok else 'FAILS'}  {detail}", flush=True)
    raise SystemExit(int(failed))


def print_versions() -> None:
    """Print the versions of the libraries, and what the LM head runs on."""
    import torch

    from troll_trl.compat import refuse_missing
    from troll_trl.kernels.dispatch import TRITON_AVAILABLE, use_triton

    refuse_missing(["check"])
    from trl.scripts.env import print_env

    print_env()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    print(f"- troll_trl version: {__version__}")
    print(f"- Triton version: {version('triton') if TRITON_AVAILABLE else 'not installed'}")
    print(f"- LM head: {'Triton kernels' if use_triton(device) else 'torch'} on {device.type}")
    print(f"- math-verify version: {version('math-verify')}\n")


def check_kernels() -> tuple[bool, str]:
    """Compare the LM head and the projection with and without Triton kernels, on this machine's accelerator."""
    import torch

    from troll_trl.kernels.dispatch import use_triton
    from troll_trl.lm_head.kernel_check import self_check

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if not use_triton(device):
        return True, f"none run on {device.type}: PyTorch takes their place"
    results = self_check(device)
    wrong = [str(result) for result in results if not result.ok]
    remedy = "Set TROLL_KERNELS=torch to train with PyTorch in their place, and please report this."
    return not wrong, f"{'; '.join(wrong)}. {remedy}" if wrong else f"{len(results)} comparisons agree with PyTorch"


def load_model(name: str | None, dtype: str) -> Any:
    """Load the named model, or make a small one."""
    import torch
    from transformers import AutoModelForCausalLM

    from troll_trl.evaluation.model_facts import check_model
    from troll_trl.small_models import make_model, make_tokenizer

    torch.manual_seed(0)
    if name is None:
        return make_model(make_tokenizer())
    check_model(name)
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)


def check_model(model: Any) -> tuple[bool, str]:
    """Compare the sparse head's log-probabilities and gradient with a model's own logits, on random tokens."""
    import torch

    from troll_trl.lm_head import add_sparse_lm_head
    from troll_trl.lm_head.head_check import check_head

    model = model.to(torch.accelerator.current_accelerator() or "cpu")
    try:
        add_sparse_lm_head(model)
        vocabulary = model.config.get_text_config().vocab_size
        input_ids = torch.randint(vocabulary, (2, 24), device=model.device)
        attention_mask = torch.ones_like(input_ids)
        attention_mask[1, :3] = 0
        labels = input_ids.clone()
        labels[:, :8] = -100
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        check_head(model, inputs, completion_length=16, support_size=min(64, vocabulary), temperature=1.0)
    except ValueError as error:
        return False, str(error)
    return True, f"{type(model).__name__}, {model.dtype}: log-probabilities and gradient agree with its own logits"


def check_loss() -> tuple[bool, str]:
    """Train a small model with TROLL without a bound or a regression, and with TRL's GRPO without a clip."""
    from trl import GRPOConfig, GRPOTrainer

    from troll_trl import TrollGRPOConfig, TrollGRPOTrainer

    ours = _train(TrollGRPOTrainer, TrollGRPOConfig, kl_bound=math.inf, regression_coef=0.0)
    theirs = _train(GRPOTrainer, GRPOConfig, epsilon=math.inf, epsilon_high=math.inf)
    start, *_ = ours
    movement = max((theirs[1][name] - start[name]).abs().max().item() for name in start)
    difference = max((ours[1][name] - theirs[1][name]).abs().max().item() for name in start)
    detail = f"weights differ from TRL's by {difference:.1e} at a movement of {movement:.1e}, after {_UPDATES} updates"
    return movement > 0 and difference <= _LOSS_TOLERANCE * movement, detail


def _train(trainer_class: Callable, config_class: Callable, **options: Any) -> tuple[dict, dict]:
    """Return a small model's weights before and after a short training run."""
    import torch
    from datasets import Dataset
    from transformers.utils.logging import disable_progress_bar

    from troll_trl.small_models import make_model, make_tokenizer

    disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4.0)  # distributions that are neither uniform nor certain
    start = {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # the run prints its log
        config = config_class(
            output_dir=folder,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            bf16=False,
            per_device_train_batch_size=8,
            num_generations=4,
            steps_per_generation=4,
            gradient_accumulation_steps=1,
            max_completion_length=8,
            max_steps=_UPDATES,
            optim="sgd",  # Adam would scale the rounding of small gradients up to full steps
            learning_rate=0.3,
            **options,
        )
        trainer = trainer_class(
            model=model,
            reward_funcs=_reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [f"What is {n}?" for n in range(32)]}),
            processing_class=tokenizer,
        )
        trainer.train()
    return start, {name: weight.detach().cpu() for name, weight in trainer.model.named_parameters()}


def _reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Reward a completion by its tokens, so the rewards of a prompt's completions differ."""
    return [sum((7 * token) % 13 for token in ids) / (13 * len(ids)) for ids in completion_ids]
