"""Asynchronous GRPO with TRL's own rollout worker and a real vLLM server on a CPU: weights travel over a TCP store."""

from types import SimpleNamespace

from datasets import Dataset
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import weight_transfer

from tests.engines.async_engine import make_trainer
from tests.tiny import tiny_prompts, tiny_tokenizer, token_reward


def send_weights_by_loopback(patch=setattr):
    """The trainer's side of `vllm_loopback`, in place of NCCL."""
    from vllm.distributed.utils import StatelessProcessGroup

    def open_endpoint(info):
        group = StatelessProcessGroup.create(info["master_address"], info["master_port"], 0, info["world_size"])
        group.group = SimpleNamespace()  # of NCCL's group the client forgets store and socket
        return group

    def send(iterator, group, src, post_iter_func):
        for item in iterator:
            group.broadcast_obj(post_iter_func(item).detach().clone(), src)

    patch(weight_transfer, "open_trainer_endpoint", open_endpoint)
    patch(weight_transfer, "packed_nccl_broadcast_producer", send)


def make_served_trainer(model, url, output, **options):
    """A trainer whose worker and exchange of weights are TRL's, and whose samples are kept in `received`."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    prompts = [{"prompt": [{"role": "user", "content": text}]} for text in tiny_prompts()["prompt"]]
    options = {"vllm_server_base_url": url, "max_inflight_tasks": 8, "queue_maxsize": 32, **options}
    trainer = make_trainer(
        model,
        output,
        None,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(prompts),
        reward_funcs=[token_reward],
        **options,
    )
    trainer.received = []
    get = trainer.rollout_queue.get

    def keep(*args, **kwargs):
        trainer.received.append(get(*args, **kwargs))
        return trainer.received[-1]

    trainer.rollout_queue.get = keep
    return trainer
