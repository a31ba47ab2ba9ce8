"""What a user may get wrong is named before the first update, with the value and what is allowed."""

import json
import math

import pytest
from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer, token_reward
from training_args import parse_training_args
from trl import GRPOConfig, GRPOTrainer

from math_answers.data.files import load_rows
from troll_trl import TrollGRPOConfig, TrollGRPOTrainer, TrollRLOOConfig, TrollRLOOTrainer
from troll_trl.resilience.prompt_length import check_prompts

CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no"}
BATCH = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 2, "disable_tqdm": True, "beta": 0.0}


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("epsilon", -0.1, "at least 0"),
        ("epsilon_high", math.nan, "at least 0"),
        ("temperature", 0.0, "positive and finite"),
        ("learning_rate", -1e-6, "at least 0 and finite"),
        ("learning_rate", "fast", "at least 0 and finite"),
        ("beta", -0.1, "at least 0 and finite"),
        ("weight_decay", -0.1, "at least 0 and finite"),
        ("max_grad_norm", -1.0, "at least 0"),
        ("adam_beta2", 1.0, r"in \[0, 1\)"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_k", -5, "a whole number of at least 0"),
        ("min_p", 1.5, r"in \[0, 1\]"),
        ("repetition_penalty", 0.0, "positive and finite"),
        ("num_generations", 1, "a whole number of at least 2"),
        ("num_iterations", 0, "a whole number of at least 1"),
        ("steps_per_generation", 0, "a whole number of at least 1"),
        ("gradient_accumulation_steps", 0, "a whole number of at least 1"),
        ("per_device_train_batch_size", 0, "a whole number of at least 1"),
        ("max_completion_length", 0, "a whole number of at least 1"),
        ("max_steps", 0, "-1 "),
        ("num_train_epochs", -1.0, "positive and finite"),
        ("reward_weights", [1.0, math.inf], "finite numbers, got inf for reward function 1"),
        ("max_skipped_updates", 0, "a whole number of at least 1"),
        ("max_skipped_updates", None, "a whole number of at least 1"),
        ("max_skipped_updates", math.inf, "a whole number of at least 1"),
        ("temperature", None, "positive and finite"),
        ("num_generations", None, "a whole number of at least 2"),
        ("epsilon", None, "at least 0"),
        ("reward_weights", 1.0, "a list with a number for each reward function, got 1.0"),
        ("kl_bound", 0.0, "positive or 'auto'"),
        ("kl_bound", math.nan, "positive or 'auto'"),
        ("kl_bound", "wide", "positive or 'auto'"),
        ("tail_mass", 1.0, r"in \[0, 1\)"),
    ],
)
@pytest.mark.parametrize("config", [TrollGRPOConfig, TrollRLOOConfig])
def test_an_option_out_of_its_range_is_named(config, option, value, allowed, tmp_path):
    with pytest.raises(ValueError, match=rf"`{option}`.* {allowed}") as error:
        config(output_dir=str(tmp_path), **CPU | {option: value})
    shown = "inf" if isinstance(value, list) else str(value)
    assert shown in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"trust_region": "penalty", "delta": 0.0}, "`delta` must be positive, got 0.0"),
        ({"trust_region": "penalty", "delta": "2"}, "`delta` must be positive, got '2'"),
        ({"importance_sampling_level": "Sequence"}, "must be 'token' or 'sequence', got 'Sequence'"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "divides by `max_completion_length`, which is None"),
    ],
)
def test_options_of_the_loss_are_refused_before_its_check_blames_trl(options, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        TrollGRPOConfig(output_dir=str(tmp_path), **CPU | options)


def test_what_recipes_use_is_taken(tmp_path):
    """Infinities that switch a limit off, and vLLM's −1 for all tokens."""
    options = {"top_k": -1, "max_grad_norm": math.inf, "epsilon": math.inf, "off_policy_mask_threshold": math.inf}
    options |= {"vllm_importance_sampling_clip_max": math.inf, "repetition_penalty": 0.9}
    TrollGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


def test_a_config_of_trls_is_checked_too(tmp_path):
    with pytest.raises(ValueError, match=r"`epsilon` must be at least 0, got -0\.1"):
        TrollGRPOConfig.from_trl(GRPOConfig(output_dir=str(tmp_path), epsilon=-0.1, **CPU))


def test_so_is_the_clip_of_the_script(tmp_path, capsys):
    flags = ["--method", "clip", "--dataset_name", "x", "--model_name_or_path", "x", "--output_dir", str(tmp_path)]
    with pytest.raises(SystemExit):
        parse_training_args([*flags, "--epsilon", "-0.1", "--use_cpu", "--bf16", "false"])
    assert "`epsilon` must be at least 0, got -0.1" in capsys.readouterr().err


def make(folder, dataset, trainer=TrollGRPOTrainer, config=TrollGRPOConfig, eval_dataset=None, scaling=None, **options):
    args = config(output_dir=str(folder), **CPU | BATCH | {"max_completion_length": 8} | options)
    model = tiny_model(max_position_embeddings=24, **({"rope_parameters": scaling} if scaling else {}))
    return trainer(model, token_reward, args, dataset, eval_dataset, processing_class=tiny_tokenizer())


def prompts(*texts):
    return Dataset.from_dict({"prompt": ["w1 w2", "w3", *texts]})


@pytest.mark.parametrize(
    "empty",
    ["", "  \n", [], [{"role": "user", "content": ""}], [{"role": "user", "content": [{"type": "text", "text": " "}]}]],
)
def test_an_empty_prompt_is_named_with_its_row(empty, tmp_path):
    before = ["w1", "w2"] if isinstance(empty, str) else [[{"role": "user", "content": "w1"}]] * 2
    if isinstance(empty, list) and empty and isinstance(empty[0]["content"], list):
        before = [[{"role": "user", "content": [{"type": "text", "text": "w1"}]}]] * 2
    with pytest.raises(ValueError, match="prompt of row 2 of train is empty"):
        make(tmp_path, Dataset.from_dict({"prompt": [*before, empty]}))


def test_a_prompt_that_is_no_text_is_shown_with_its_row(tmp_path):
    with pytest.raises(ValueError, match=r"prompt of row 0 of train is 3\. It must be a text or a list of messages"):
        make(tmp_path, Dataset.from_dict({"prompt": [3, 4]}))


@pytest.mark.parametrize("trainer", [(TrollGRPOTrainer, TrollGRPOConfig), (TrollRLOOTrainer, TrollRLOOConfig)])
def test_prompts_that_leave_no_room_are_named_with_their_row(trainer, tmp_path):
    make(tmp_path, prompts(" ".join(["w1"] * 16)), *trainer)  # 16 + 8 tokens fit exactly
    with pytest.raises(
        ValueError, match=r"row 2 of train has 17 tokens; with `max_completion_length` 8 .* context of 24"
    ):
        make(tmp_path, prompts(" ".join(["w1"] * 17)), *trainer)
    with pytest.raises(ValueError, match="row 2 of eval has 17 tokens"):
        make(tmp_path, prompts(), *trainer, eval_dataset=prompts(" ".join(["w1"] * 17)))
    with pytest.raises(ValueError, match="row 2 of hard has 17 tokens"):
        make(tmp_path, prompts(), *trainer, eval_dataset={"easy": prompts(), "hard": prompts(" ".join(["w1"] * 17))})


def test_a_prompt_without_room_is_found_in_its_file(tmp_path):
    """The message had the row of a data set whose name and dropped rows it did not tell."""
    file = tmp_path / "own.jsonl"
    rows = [{"prompt": "w1", "level": 0}, {"prompt": "w2", "level": 1}, {"prompt": "w3 " * 17, "level": 1}]
    file.write_text("\n".join(map(json.dumps, rows)))
    own = load_rows(str(file), "train", None)[0].filter(lambda row: row["level"] == 1)
    with pytest.raises(ValueError, match=r"row 1 of train \(.*own\.jsonl\) has 17 tokens; .* begins with 'w3 w3 w3 w3"):
        make(tmp_path, own)


def test_without_a_longest_completion_one_token_must_fit(tmp_path):
    """To TRL, `None` leaves the length to `generation_kwargs`."""
    make(tmp_path, prompts(" ".join(["w1"] * 23)), max_completion_length=None, loss_type="grpo")
    with pytest.raises(ValueError, match=r"row 2 of train has 24 tokens; .* context of 24"):
        make(tmp_path, prompts(" ".join(["w1"] * 24)), max_completion_length=None, loss_type="grpo")


def test_prompts_that_surely_fit_are_not_tokenized(tmp_path, monkeypatch):
    """A data set of 100,000 prompts is looked through in a second."""
    seen = []
    tokenize = GRPOTrainer._tokenize_prompts

    def counting(self, prompts):
        seen.extend(prompts)
        return tokenize(self, prompts)

    monkeypatch.setattr(GRPOTrainer, "_tokenize_prompts", counting)
    make(tmp_path, prompts("w1 w2 w3", "w1 w2 w3 w4 w5"))
    assert seen == ["w1 w2"]
    make(tmp_path, prompts("w1 w2 w3", "w1 w2 w3 w4 w5 w6"))
    assert seen[1:] == ["w1 w2", "w1 w2 w3 w4 w5 w6"], "17 bytes, and room for 16 tokens"


def test_what_the_chat_template_adds_to_every_message_counts(tmp_path):
    """Row 0 has one message: a conversation of many short ones passed, whatever the template adds to each."""
    trainer = make(tmp_path, prompts())
    trainer.processing_class.chat_template = "{% for message in messages %}w2 w2 {{ message['content'] }} {% endfor %}"
    chat = lambda count: [{"role": "user", "content": "w1"}] * count
    trainer.train_dataset = Dataset.from_dict({"prompt": [chat(1), chat(5)]})
    check_prompts(trainer)  # 15 tokens, and room for 16
    trainer.train_dataset = Dataset.from_dict({"prompt": [chat(1), chat(6)]})
    with pytest.raises(ValueError, match=r"row 1 of train has 18 tokens; .* context of 24"):
        check_prompts(trainer)


def test_prompts_must_fit_vllms_length_where_it_is_shorter(tmp_path):
    trainer = make(tmp_path, prompts(" ".join(["w1"] * 16)))
    args = trainer.args
    args.use_vllm, args.vllm_mode, args.vllm_max_model_length = True, "colocate", 20
    with pytest.raises(ValueError, match=r"has 16 tokens; .* exceeds the context of 20 .*`vllm_max_model_length`"):
        check_prompts(trainer)
    args.vllm_max_model_length = 4096
    trainer.train_dataset = prompts(" ".join(["w1"] * 17))
    with pytest.raises(ValueError, match=r"has 17 tokens; .* exceeds the context of 24"):
        check_prompts(trainer)
    trainer.train_dataset = prompts(" ".join(["w1"] * 16))
    args.vllm_mode = "server"  # which has a length of its own
    args.vllm_max_model_length = 20
    check_prompts(trainer)


def test_what_a_rollout_function_does_with_a_prompt_is_its_own(tmp_path):
    """It may make prompts of task records, which are empty or longer than the context; TRL trains on its tokens."""

    def rollout(records, trainer):
        ids = [[5, 6]] * len(records)
        return {"prompt_ids": ids, "completion_ids": [[7, 8 + n % 3] for n in range(len(ids))], "logprobs": None}

    records = Dataset.from_dict({"prompt": ["", " ".join(["w1"] * 60)] * 4})
    args = TrollGRPOConfig(output_dir=str(tmp_path), **CPU | BATCH | {"max_completion_length": 8, "max_steps": 1})
    model = tiny_model(max_position_embeddings=24)
    trainer = TrollGRPOTrainer(
        model, token_reward, args, records, processing_class=tiny_tokenizer(), rollout_func=rollout
    )
    trainer.train()
    assert trainer.state.global_step == 1


def test_scaled_positions_reach_further_than_the_config_says(tmp_path):
    """YaRN on Qwen3: `max_position_embeddings` stays that of the model before scaling."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 1e4}
    make(tmp_path, prompts(" ".join(["w1"] * 88)), scaling=scaling)
    with pytest.raises(ValueError, match=r"has 89 tokens; .* context of 96"):
        make(tmp_path, prompts(" ".join(["w1"] * 89)), scaling=scaling)
