"""What to write in place of a name of TRL, transformers or open-r1, if the nearest valid name misleads or is none."""

_ENV = "Set the environment variable {} instead, for instance under `env`."

RENAMED = {
    # TRL and transformers
    "torch_dtype": "Write `dtype`.",
    "no_cuda": "Write `use_cpu`.",
    "max_prompt_length": "Write `max_prompt_tokens`, which drops longer prompts and cuts none.",
    "use_liger_loss": "Write `use_liger_kernel`.",
    "vllm_guided_decoding_regex": "Write `vllm_structured_outputs_regex`.",
    "vllm_device": "Remove it: with `vllm_mode: colocate` vLLM shares the training GPUs.",
    "warmup_ratio": "Write `warmup_steps`; a number below 1 is a share of all updates.",
    "overwrite_output_dir": "Remove it: no run overwrites `output_dir`; `--resume` continues the run there.",
    "logging_dir": _ENV.format("TENSORBOARD_LOGGING_DIR"),
    "push_to_hub_token": "Write `hub_token`.",
    "divergence_topk": "Write `support_size`, which counts the sampled token too.",
    "clip_ratio_c": "Write `ratio_cap`.",
    # open-r1
    "dataset_mixture": "Write `datasets`, a list of mappings with path, name, split, columns and fraction.",
    "dataset_prompt_column": "Write `problem_column`.",
    "hub_model_revision": "Write `hub_revision`, the branch that is pushed to; `model_revision` loads another model.",
    "push_to_hub_revision": "Write `push_to_hub`.",
    "chat_template": "Remove it, and save the template with the model's tokenizer; for its options there is "
    "`chat_template_kwargs`.",
    "wandb_entity": _ENV.format("WANDB_ENTITY"),
    "wandb_project": _ENV.format("WANDB_PROJECT"),
    "max_completion_len": "It is an argument of `get_soft_overlong_punishment(...)`, which `reward_funcs` may call.",
}

# For `troll eval`: the names of training
EVALUATION = {
    "model_name_or_path": "Write `model`.",
    "dataset_name": "Write `benchmarks: [name=path]`.",
    "max_completion_length": "Write `max_new_tokens`.",
    "num_generations": "Write `n`.",
    "per_device_eval_batch_size": "Write `batch_size`.",
    "use_vllm": "Write `backend: vllm`.",
}
