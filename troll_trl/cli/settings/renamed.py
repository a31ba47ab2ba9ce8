"""What to write in place of a name that TRL, transformers or open-r1 has or had, and this package lacks."""

_GONE = "It no longer does anything: remove it."
_OPEN_R1 = "It belongs to open-r1's own script: remove it."
_OPEN_R1_REWARD = "It sets a reward function of open-r1: write your own function, and name it in `reward_funcs`."
_ARGUMENT = "It is an argument of a reward function: put it into `reward_funcs`, as in {}."
_ENV = "Set the environment variable {} instead, for instance under `env`."

RENAMED = {
    # TRL
    "max_prompt_length": "Write `max_prompt_tokens`, which drops longer prompts and cuts none.",
    "use_liger_loss": "Write `use_liger_kernel`.",
    "wandb_log_unique_prompts": "Write `log_unique_prompts`.",
    "vllm_guided_decoding_regex": "Write `vllm_structured_outputs_regex`.",
    "vllm_max_model_len": "Write `vllm_max_model_length`.",
    "vllm_device": "Remove it: with `vllm_mode: colocate` vLLM shares the training GPUs.",
    "vllm_dtype": "Remove it: vLLM takes the dtype that the model's config.json names.",
    "vllm_enable_prefix_caching": "Remove it: vLLM's own default holds.",
    "epsilon_low": "Write `epsilon`, which only `method: clip` uses.",
    "divergence_topk": "Write `support_size`, which counts the sampled token too.",
    "clip_ratio_c": "Write `ratio_cap`.",
    "num_generation": "Write `num_generations`.",
    "dataset_mixture": "Write `datasets`, a list of mappings with path, name, split, columns and fraction.",
    # transformers
    "torch_dtype": "Write `dtype`.",
    "evaluation_strategy": "Write `eval_strategy`.",
    "no_cuda": "Write `use_cpu`.",
    "per_gpu_train_batch_size": "Write `per_device_train_batch_size`.",
    "per_gpu_eval_batch_size": "Write `per_device_eval_batch_size`.",
    "warmup_ratio": "Write `warmup_steps`; a number below 1 is a share of all updates.",
    "push_to_hub_model_id": "Write `hub_model_id`.",
    "push_to_hub_token": "Write `hub_token`.",
    "overwrite_output_dir": "Remove it: no run overwrites `output_dir`; `--resume` continues the run there.",
    "logging_dir": _ENV.format("TENSORBOARD_LOGGING_DIR"),
    "jit_mode_eval": _GONE,
    "past_index": _GONE,
    "save_safetensors": "Remove it: models are always saved as safetensors.",
    # open-r1
    "dataset_prompt_column": "Write `problem_column`.",
    "hub_model_revision": "Write `hub_revision`, the branch that is pushed to; `model_revision` loads another model.",
    "push_to_hub_revision": "Write `push_to_hub`.",
    "overwrite_hub_revision": _OPEN_R1,
    "benchmarks": "Remove it, and evaluate what was trained with `troll eval`.",
    "callbacks": _OPEN_R1,
    "chat_template": "Remove it, and save the template with the model's tokenizer; for its options there is "
    "`chat_template_kwargs`.",
    "wandb_entity": _ENV.format("WANDB_ENTITY"),
    "wandb_project": _ENV.format("WANDB_PROJECT"),
    "wandb_run_group": _ENV.format("WANDB_RUN_GROUP"),
    **dict.fromkeys(
        ("max_completion_len", "soft_punish_cache"),
        _ARGUMENT.format("get_soft_overlong_punishment(max_completion_len=..., soft_punish_cache=...)"),
    ),
    **dict.fromkeys(
        ("repetition_n_grams", "repetition_max_penalty"),
        _ARGUMENT.format("trl.rewards.get_repetition_penalty_reward(ngram_size=..., max_penalty=...)"),
    ),
    **dict.fromkeys(
        (
            *("cosine_min_value_wrong", "cosine_max_value_wrong", "cosine_min_value_correct"),
            *("cosine_max_value_correct", "cosine_max_len"),
        ),
        _ARGUMENT.format("trl.rewards.get_cosine_scaled_reward(...)"),
    ),
    **dict.fromkeys(
        (
            *("code_language", "code_eval_test_batch_size"),
            *("code_eval_scoring_mode", "parallel_code_exec_per_proc", "code_provider", "ioi_provider"),
            *("e2b_router_url", "morph_router_url", "piston_endpoint"),
        ),
        _OPEN_R1_REWARD,
    ),
}

_OWN_REWARD = "Write it as a function of your own, and give its import path."

# Reward functions of open-r1
REWARDS = {
    "accuracy": "Write accuracy_reward.",
    "format": "Write think_format_reward, which asks for no <answer>.",
    "cosine": "Write trl.rewards.get_cosine_scaled_reward(max_len=...).",
    "repetition_penalty": "Write trl.rewards.get_repetition_penalty_reward(ngram_size=..., max_penalty=...).",
    "soft_overlong_punishment": "Write get_soft_overlong_punishment(max_completion_len=..., soft_punish_cache=...).",
    **dict.fromkeys(("reasoning_steps", "length", "tag_count"), _OWN_REWARD),
    **dict.fromkeys(("code", "binary_code", "code_format", "ioi_code", "cf_code"), _OWN_REWARD),
}

# For `troll eval`: the names of training
EVALUATION = {
    "model_name_or_path": "Write `model`.",
    "model_revision": "Write `revision`.",
    "output_dir": "Write `output`.",
    "max_completion_length": "Write `max_new_tokens`.",
    "num_generations": "Write `n`.",
    "per_device_eval_batch_size": "Write `batch_size`.",
    "max_eval_samples": "Write `max_problems`.",
    "use_vllm": "Write `backend: vllm`.",
    "use_cpu": "Remove it: an evaluation takes the CPU if there is no GPU.",
    **dict.fromkeys(("dataset_name", "eval_dataset_name"), "Write `benchmarks: [name=path]`."),
}
