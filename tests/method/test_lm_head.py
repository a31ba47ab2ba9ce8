"""The streaming sparse head against full logits, against TRL's fused head, and against its promise to stay small."""

import types
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    ElectraConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4TextConfig,
    ModernBertDecoderConfig,
    MptConfig,
    PhiConfig,
    PhiForCausalLM,
    Qwen3MoeConfig,
    RecurrentGemmaConfig,
    RemBertConfig,
    RobertaConfig,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

from tests.references import reference_sparse_log_probs, reference_support
from tests.support.ranks import in_two_ranks
from tests.tiny import tiny_model
from troll_trl.kernels import support, tiles
from troll_trl.kernels.tiles import LogitTransform
from troll_trl.lm_head import add_sparse_lm_head, support_selection
from troll_trl.lm_head.sparse_log_probs import SparseLogProbs

SMALL = {
    "vocab_size": 331,  # a multiple of neither block nor tile
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
MODELS = {
    "qwen3": lambda: tiny_model("qwen3", vocab_size=331),
    "llama_untied": lambda: tiny_model("llama", vocab_size=331, tie_word_embeddings=False),
    "gemma2_soft_capping": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=2.0)),
    "cohere_logit_scale": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=3.0)),
    "granite_logits_scaling": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=0.25)),
    "phi_head_bias": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**SMALL)),
    "apertus": lambda: ApertusForCausalLM(ApertusConfig(**SMALL)),
}
TEMPERATURE = 0.7


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles in both directions, the last of each ragged."""
    monkeypatch.setattr(tiles, "TRAINING_TILE", {"cpu": (5, 128), "accelerator": (5, 128)})
    monkeypatch.setattr(support_selection, "_COLUMNS", {"cpu": 128, "accelerator": 128})
    # On a CPU beside the 128 logits of a chunk the best blocks, up to 24 of 64
    monkeypatch.setattr(support_selection, "_TILE_ELEMENTS", {"cpu": 5 * 1664, "accelerator": 5 * 384})


def make_model(name: str):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.normal_(std=0.5)
        if head.bias is not None:
            head.bias.normal_()
    return model


def make_batch(vocabulary: int = 331, batch: int = 3, length: int = 9):
    """Input ids, attention mask and labels: left padding, a masked prompt, holes, and one row without any label."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, vocabulary, (batch, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :2] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :3] = -100
    labels[1, 5] = -100
    labels[2] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def full_distribution(model, batch):
    """log-probabilities `(B, T − 1, V)` after the temperature, from the model's own logits."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return torch.log_softmax(logits.float() / TEMPERATURE, -1)


def gradients(model, loss):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def assert_close_gradients(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5 * e.abs().max().item() + 1e-7)


@pytest.mark.parametrize("name", MODELS)
class TestAgainstFullLogits:
    @pytest.mark.parametrize("whole", [False, True], ids=["chunks", "whole_vocabulary"])
    def test_selection(self, name, whole, monkeypatch):
        if whole:  # as torch on a GPU
            monkeypatch.setattr(support_selection, "_one_chunk_at_a_time", lambda device: False)
            monkeypatch.setattr(support_selection, "_TILE_ELEMENTS", {"cpu": 5 * 384})
        model, batch = make_model(name), make_batch()
        expected = full_distribution(model, batch).detach()
        add_sparse_lm_head(model, TEMPERATURE)
        with torch.no_grad():
            output = model(**batch, fused_lm_head=True, support_size=24, tail_mass=0.05)
        assert output.token_ids.dtype == torch.int32 and output.token_ids.shape == (3, 8, 24)
        assert output.sparse_log_probs.dtype == torch.float32 and output.sparse_log_probs.shape == (3, 8, 25)
        for b, t in (batch["labels"][:, 1:] != -100).nonzero().tolist():
            sampled, row = batch["labels"][b, t + 1].item(), expected[b, t]
            support, log_probs = reference_support(row.numpy(), sampled, 24, 0.05)
            unused = 24 - len(support)
            assert output.token_ids[b, t].tolist() == support + [-1] * unused
            log_probs[-1:-1] = [-torch.inf] * unused
            torch.testing.assert_close(output.sparse_log_probs[b, t], torch.tensor(log_probs), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(output.log_probs[b, t], row[sampled], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(output.entropy[b, t], -(row.exp() * row).sum(), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("frozen", ["nothing", "head", "backbone"])
    def test_evaluation_and_gradient(self, name, frozen):
        model, batch = make_model(name), make_batch()
        head = model.get_output_embeddings()
        for parameter in model.parameters():
            is_head = any(parameter is p for p in head.parameters())
            parameter.requires_grad_(frozen == "nothing" or is_head == (frozen == "backbone"))
        generator = torch.Generator().manual_seed(2)
        token_ids = torch.stack([torch.randperm(331, generator=generator)[:7] for _ in range(24)]).view(3, 8, 7)
        token_ids[..., 5:] = -1
        labels = batch["labels"][:, 1:]
        live = labels != -100
        clash = (token_ids == labels.unsqueeze(-1)) & live.unsqueeze(-1)
        token_ids = token_ids.masked_fill(clash, -1)
        token_ids[..., 0] = torch.where(live, labels, -1)
        upstream = torch.randn(3, 8, 8, generator=generator)
        upstream_entropy = torch.randn(3, 8, generator=generator)

        log_probs = full_distribution(model, batch)
        expected = reference_sparse_log_probs(log_probs[live], token_ids[live]).float()
        used = expected > -torch.inf
        expected_entropy = -(log_probs.exp() * log_probs).sum(-1)[live]
        loss = (expected[used] * upstream[live][used]).sum() + (expected_entropy * upstream_entropy[live]).sum()
        expected_gradients = gradients(model, loss)

        add_sparse_lm_head(model, TEMPERATURE)
        output = model(**batch, fused_lm_head=True, token_ids=token_ids)
        actual = output.sparse_log_probs[live]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(output.entropy[live], expected_entropy, rtol=1e-4, atol=1e-5)
        assert torch.equal(output.log_probs[live], actual[:, 0])
        loss = (actual[used] * upstream[live][used]).sum() + (output.entropy * upstream_entropy)[live].sum()
        assert_close_gradients(gradients(model, loss), expected_gradients)

    def test_agrees_with_trl(self, name):
        model, batch = make_model(name), make_batch()
        add_fused_lm_head(model, TEMPERATURE, outputs=("log_probs", "entropy"))
        trl = model(**batch, fused_lm_head=True)
        add_sparse_lm_head(model, TEMPERATURE)
        ours = model(**batch, fused_lm_head=True, support_size=5)
        torch.testing.assert_close(ours.log_probs, trl.log_probs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.entropy, trl.entropy, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(**batch, fused_lm_head=True).log_probs, trl.log_probs), "TRL's own call has changed"


def test_other_calls_are_unchanged():
    model, batch = make_model("qwen3").eval(), make_batch()
    with torch.no_grad():
        before = model(**batch)
        generated = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
        add_sparse_lm_head(model, TEMPERATURE)
        after = model(**batch)
        assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)
        assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False), generated)


def test_masked_positions_hold_the_rest_alone():
    model, batch = make_model("qwen3"), make_batch()
    add_sparse_lm_head(model)
    output = model(**batch, fused_lm_head=True, support_size=8)
    masked = batch["labels"][:, 1:] == -100
    assert (output.token_ids[masked] == -1).all()
    assert (output.sparse_log_probs[masked][:, :-1] == -torch.inf).all()
    assert (output.sparse_log_probs[masked][:, -1] == 0).all()
    assert (output.log_probs[masked] == 0).all() and (output.entropy[masked] == 0).all()


def test_no_live_position_has_a_zero_gradient():
    model, batch = make_model("qwen3"), make_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    add_sparse_lm_head(model)
    with torch.no_grad():
        token_ids = model(**batch, fused_lm_head=True, support_size=8).token_ids
    output = model(**batch, fused_lm_head=True, token_ids=token_ids)
    (output.log_probs.sum() + output.entropy.sum()).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_supports_may_be_aligned_to_the_end():
    model, batch = make_model("qwen3"), make_batch()
    add_sparse_lm_head(model)
    with torch.no_grad():
        whole = model(**batch, fused_lm_head=True, support_size=8)
        tail = model(**batch, fused_lm_head=True, token_ids=whole.token_ids[:, 2:])
    torch.testing.assert_close(tail.sparse_log_probs, whole.sparse_log_probs)
    assert torch.equal(tail.token_ids, whole.token_ids)


def test_selection_with_gradient():
    model, batch = make_model("qwen3"), make_batch()
    add_sparse_lm_head(model)
    output = model(**batch, fused_lm_head=True, support_size=8)
    evaluated = model(**batch, fused_lm_head=True, token_ids=output.token_ids)
    assert torch.equal(output.sparse_log_probs, evaluated.sparse_log_probs)
    assert_close_gradients(gradients(model, output.log_probs.sum()), gradients(model, evaluated.log_probs.sum()))


def test_rest_mass_does_not_cancel():
    """1 − Σ kept would be 0 in float32 here; the rest is 1e-12."""
    logits = 1e-3 * torch.randn(1, 331, generator=torch.Generator().manual_seed(0))
    logits[0, 7] = 33.0
    hidden, head = head_of(logits)
    rest = logits.double().log_softmax(1)[0, [v for v in range(331) if v != 7]].logsumexp(0)
    assert rest < -25
    ids, selected, _ = support_selection.select_support(hidden, head, None, torch.tensor([7]), 1, 0.0, LogitTransform())
    evaluated, _ = SparseLogProbs.apply(hidden, head, None, ids, LogitTransform(), None)
    for log_probs in (selected, evaluated):
        torch.testing.assert_close(log_probs[0, -1].double(), rest, rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", [1, 30, 1000, 30_000])  # of the logits
def test_probabilities_sum_to_one_however_large_the_logits(size):
    """The difference of a logit and a log-sum-exp of some thousands would be off by 4e-4."""
    model, batch = make_model("llama_untied"), make_batch()
    with torch.no_grad():
        model.lm_head.weight.mul_(size / model(**batch).logits.abs().max())
    add_sparse_lm_head(model)
    selected = model(**batch, fused_lm_head=True, support_size=8)
    evaluated = model(**batch, fused_lm_head=True, token_ids=selected.token_ids)
    for output in (selected, evaluated):
        total = output.sparse_log_probs.double().exp().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_full_logits(dtype):
    batch = make_batch()
    exact = full_distribution(make_model("qwen3").double(), batch)
    naive_model = make_model("qwen3").to(dtype)
    naive = full_distribution(naive_model, batch)
    add_sparse_lm_head(naive_model, TEMPERATURE)
    output = naive_model(**batch, fused_lm_head=True, support_size=16)
    live = batch["labels"][:, 1:] != -100
    ids = output.token_ids[live].long().clamp(min=0)
    used = output.token_ids[live] >= 0
    error = (output.sparse_log_probs[live][:, :-1] - exact[live].gather(-1, ids))[used].abs().max()
    naive_error = (naive[live].gather(-1, ids) - exact[live].gather(-1, ids))[used].abs().max()
    assert error <= naive_error * 1.1 + 1e-3, f"{error} against {naive_error}"


def test_float32_head_on_a_bfloat16_model():
    batch = make_batch()
    model = make_model("llama_untied").to(torch.bfloat16)
    hidden = model.base_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    expected = torch.log_softmax(hidden[:, :-1].float() @ model.lm_head.weight.float().t() / TEMPERATURE, -1)
    add_sparse_lm_head(model, TEMPERATURE, cast_lm_head_to_fp32=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**batch, fused_lm_head=True, support_size=4)
    live = batch["labels"][:, 1:] != -100
    sampled = expected[live].gather(-1, batch["labels"][:, 1:][live].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(output.log_probs[live], sampled, rtol=1e-5, atol=1e-5)


class _LargestTensor(TorchDispatchMode):
    """Records the largest memory that any operation returns, in elements; that of the head and its gradient aside."""

    def __init__(self, head_elements: int):
        super().__init__()
        self.head_elements, self.largest = head_elements, (0, None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                elements = x.untyped_storage().nbytes() // x.element_size()
                if elements != self.head_elements:
                    self.largest = max(self.largest, (elements, str(func)))
        return result


MIXTURES = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "granitemoe": {"num_local_experts": 4},
    "granitemoehybrid": {
        "num_local_experts": 4,
        "layer_types": ["attention"],
        "shared_intermediate_size": 16,
        "mamba_n_heads": 4,
    },
    "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 16},
    "phimoe": {"num_local_experts": 4},
    "jetmoe": {"num_local_experts": 4, "kv_channels": 8},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
}


@pytest.mark.parametrize("family", MIXTURES)
def test_the_auxiliary_loss_of_every_family_is_its_own_and_trls(family):
    """ "'GraniteMoeConfig' object has no attribute 'num_experts'": it is called `num_local_experts` there."""
    config = AutoConfig.for_model(
        family, **SMALL | MIXTURES[family], num_experts_per_tok=2, output_router_logits=True, dtype="float32"
    )
    torch.manual_seed(0)
    model, batch = AutoModelForCausalLM.from_config(config).eval(), make_batch()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    own = model(**inputs, use_cache=False)
    add_fused_lm_head(model)
    add_sparse_lm_head(model)
    ours = model(**batch, fused_lm_head=True, support_size=8)
    trls = model(**batch, fused_lm_head=True)
    assert own.aux_loss > 0.1
    torch.testing.assert_close(ours.aux_loss, own.aux_loss, rtol=1e-4, atol=0)
    torch.testing.assert_close(trls.aux_loss, own.aux_loss, rtol=1e-4, atol=0)
    expected = own.logits[:, :-1].float().log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    live = batch["labels"][:, 1:] != -100
    torch.testing.assert_close(ours.log_probs[live], expected[live], rtol=1e-4, atol=1e-5)


def test_router_logits_that_nothing_gives_are_refused():
    deepseek = DeepseekV3Config(output_router_logits=True)
    with pytest.raises(ValueError, match=r"config of a deepseek_v3 model has no `num_experts`"):
        add_sparse_lm_head(types.SimpleNamespace(forward=None, config=deepseek))
    dense = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL, output_router_logits=True, mlp_only_layers=[0]))
    add_sparse_lm_head(dense)
    with pytest.raises(ValueError, match=r"no layer of this qwen3_moe model gives router logits"):
        dense(**make_batch(), fused_lm_head=True, support_size=8)


def test_a_checkpoint_around_the_head():
    """It allows what was saved to be unpacked once."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    ids = torch.stack([torch.randperm(40)[:4] for _ in range(5)]).int()
    head = lambda *inputs: SparseLogProbs.apply(*inputs, None, ids, LogitTransform(), lambda *_: nullcontext())[0]
    plain = torch.autograd.grad(head(hidden, weight).square().sum(), (hidden, weight))
    again = torch.utils.checkpoint.checkpoint(head, hidden, weight, use_reentrant=False).square().sum()
    for a, b in zip(torch.autograd.grad(again, (hidden, weight)), plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tokens", [50, 53])
def test_tiles_of_tokens_are_aligned(monkeypatch, tokens):
    """Rows of tensors that begin anywhere would have Triton compile its kernels again, in the middle of a run."""
    starts = []
    blocks_of = support_selection.blocks_of

    def note(tile, sampled_ids, *rest):
        starts.append(sampled_ids.storage_offset())
        return blocks_of(tile, sampled_ids, *rest)

    monkeypatch.setattr(support_selection, "blocks_of", note)
    hidden, weight, sampled = torch.randn(tokens, 4), torch.randn(331, 4), torch.zeros(tokens, dtype=torch.long)
    support_selection.select_support(hidden, weight, None, sampled, 4, 0.0, LogitTransform())
    assert all(start % 4 == 0 for start in starts) and len(starts) >= 2


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "rows"),
    [
        (4096, 151_936, [768] * 5 + [256]),
        (32_768, 151_936, [768] * 42 + [512]),
        (4614, 151_936, [768] * 6 + [6]),  # 769 tokens fit
        (700, 151_936, [700]),
        (4096, 32_000, [2048] * 2),
        (300, 2_000_000, [52] * 5 + [40]),  # 58 fit
        (3, 2**27, [1, 1, 1]),
        (0, 331, [0]),
    ],
)
def test_rows_of_a_tile_on_a_gpu(monkeypatch, tokens, vocabulary, rows):
    """Tiles of 684 rows left a part of the last 128 idle."""
    monkeypatch.undo()  # the small tiles
    monkeypatch.setattr(support_selection, "use_triton", lambda device: True)
    monkeypatch.setattr(support_selection, "compute_dtype", lambda hidden: hidden.dtype)
    sizes = []
    for name in ("product_into", "reduce_chunk", "choose_top_tokens"):
        monkeypatch.setattr(support_selection, name, lambda *_: None)
    blocks_of = support_selection.blocks_of
    note = lambda tile, *rest: sizes.append(len(tile)) or blocks_of(tile, *rest)
    monkeypatch.setattr(support_selection, "blocks_of", note)
    hidden, weight = (torch.empty(n, 8, dtype=torch.bfloat16, device="meta") for n in (tokens, vocabulary))
    sampled = torch.empty(tokens, dtype=torch.long, device="meta")
    support_selection.select_support(hidden, weight, None, sampled, 8, 0.0, LogitTransform())
    assert sizes == rows


def head_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and a head whose product is these logits `(N, V)` in any dtype."""
    return torch.eye(len(logits), dtype=logits.dtype), logits.t().contiguous()


def gradients_of_all(head: torch.Tensor, run) -> tuple[torch.Tensor, ...]:
    """Log-probabilities, entropy, and the gradient of sums of both."""
    head = head.clone().requires_grad_()
    log_probs, entropy = run(head)
    loss = log_probs.masked_fill(log_probs < -1e4, 0.0).sum() + 2 * entropy.sum()
    return log_probs.detach(), entropy.detach(), torch.autograd.grad(loss, head)[0]


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("share", [1.0, 0.97])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_columns_at_the_lowest_number_have_no_part(dtype, temperature, share, bias):
    """Some models mask unused columns so. Divided by a temperature below 1 they were −∞, and the entropy was NaN."""
    logits = 3 * torch.randn(4, 331, generator=torch.Generator().manual_seed(0))
    sampled = torch.tensor([5, 0, 5, 7])
    dead = torch.zeros(4, 331, dtype=torch.bool)
    dead[0, ::2] = dead[1, 64:] = dead[2:] = True  # half, whole blocks, all but two, all but the sampled token
    dead[2, 9] = False
    dead = dead.scatter(1, sampled.unsqueeze(1), False)
    logits = logits.masked_fill(dead, share * torch.finfo(dtype).min).to(dtype)
    bias = torch.linspace(-1, 1, 331).to(dtype) if bias else None
    hidden, head = head_of(logits)
    transform = LogitTransform(temperature=temperature)
    ids, log_probs, entropy = support_selection.select_support(hidden, head, bias, sampled, 9, 0.0, transform)
    evaluate = lambda head: SparseLogProbs.apply(hidden, head, bias, ids, transform, lambda *_: nullcontext())
    log_probs_again, entropy_again, gradient = gradients_of_all(head, evaluate)

    def exact(head):
        z = ((head.t() + (0.0 if bias is None else bias.double())) / temperature).masked_fill(dead, -1e9)
        full = z.log_softmax(1)
        kept = torch.zeros(4, 332, dtype=torch.bool).scatter(1, ids.long() % 332, True)[:, :331]
        rest = full.masked_fill(kept, -1e9).logsumexp(1, keepdim=True)
        sparse = torch.cat([full.gather(1, ids.long().clamp(min=0)).masked_fill(ids < 0, -1e9), rest], 1)
        return sparse, -(full.exp() * full.clamp(min=-1e4)).sum(1)

    expected, expected_entropy, expected_gradient = gradients_of_all(head.double(), exact)
    finite = expected > -1e4
    assert ((log_probs > -1e4) == finite).all() and ((log_probs_again > -1e4) == finite).all()
    for ours in (log_probs, log_probs_again):
        torch.testing.assert_close(ours[finite].double(), expected[finite], rtol=1e-5, atol=2e-5)
    for ours in (entropy, entropy_again):
        torch.testing.assert_close(ours.double(), expected_entropy, rtol=1e-4, atol=5e-5)
    close = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    size = max(expected_gradient.abs().max().item(), 1.0)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=0, atol=close * size)


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 2.0])
def test_a_sampled_token_at_the_lowest_number(temperature):
    """Its log-probability is far below any other, and nothing else is NaN."""
    logits = torch.randn(2, 331, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[:, 7] = torch.finfo(torch.bfloat16).min
    hidden, head = head_of(logits)
    transform = LogitTransform(temperature=temperature)
    ids, log_probs, entropy = support_selection.select_support(
        hidden, head, None, torch.full((2,), 7), 9, 0.0, transform
    )
    again, entropy_again = SparseLogProbs.apply(hidden, head, None, ids, transform, None)
    full = (logits.double() / temperature).log_softmax(1)
    expected = -(full.exp() * full).sum(1)
    for sparse, ours in ((log_probs, entropy), (again, entropy_again)):
        assert (sparse[:, 0] < -1e4).all() and not sparse.isnan().any()
        torch.testing.assert_close(sparse.exp().sum(1), torch.ones(2))
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["strided", "expanded", "reversed"])
@pytest.mark.parametrize("name", ["sampled_ids", "bias", "token_ids", "hidden", "weight"])
def test_inputs_of_any_layout(name, layout):
    """The kernels read sampled ids and the bias as if they were contiguous."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    inputs = {"hidden": draw(6, 16), "weight": draw(331, 16), "bias": draw(331)}
    inputs["sampled_ids"] = torch.randint(331, (6,), generator=generator)
    inputs["token_ids"] = torch.stack([torch.randperm(331, generator=generator)[:5] for _ in range(6)]).int()

    def outputs(hidden, weight, bias, sampled_ids, token_ids):
        transform = LogitTransform(temperature=0.7)
        return (
            *support_selection.select_support(hidden, weight, bias, sampled_ids, 9, 1e-2, transform),
            *SparseLogProbs.apply(hidden, weight, bias, token_ids, transform, None),
        )

    plain = inputs[name]
    if layout == "expanded":  # one row or number for all
        plain = plain[:1].expand_as(plain)
    inputs[name] = plain.contiguous()
    expected = outputs(**inputs)
    view = plain
    if layout == "strided":
        view = torch.stack([plain, torch.zeros_like(plain)], -1)[..., 0]
    elif layout == "reversed" and plain.dim() == 2:  # columns after rows
        view = plain.t().contiguous().t()
    assert torch.equal(view, plain)
    inputs[name] = view
    for ours, theirs in zip(outputs(**inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("positions", [50, 0])
def test_chunks_of_positions_change_nothing(monkeypatch, positions):
    """The supports are settled in chunks, whose float64 numbers do not grow with the positions."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (positions, 331))
    sampled = torch.randint(331, (positions,), generator=generator)
    select = lambda: support_selection.select_support(hidden, weight, None, sampled, 9, 1e-2, LogitTransform())
    whole = select()
    monkeypatch.setattr(support, "_TORCH_ROWS", 7)
    assert all(torch.equal(a, b) for a, b in zip(whole, select(), strict=True))


class _CastsOf(TorchDispatchMode):
    """Counts the elements that are cast out of the memory of one tensor."""

    def __init__(self, tensor: torch.Tensor):
        super().__init__()
        self.storage, self.elements = tensor.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() == self.storage:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_a_float32_head_is_cast_once(monkeypatch):
    """In scoring it was cast again for each tile of tokens, in the backward twice for each tile."""
    monkeypatch.setattr(tiles, "TRAINING_TILE", {"cpu": (64, 128)})  # all tokens in one tile
    model, batch = make_model("llama_untied"), make_batch()
    add_sparse_lm_head(model)
    head = model.lm_head.weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad(), _CastsOf(head) as scoring:
            token_ids = model(**batch, fused_lm_head=True, support_size=9).token_ids
        with _CastsOf(head) as forward:
            loss = model(**batch, fused_lm_head=True, token_ids=token_ids).sparse_log_probs.exp().sum()
        with _CastsOf(head) as backward:
            loss.backward()
    assert scoring.elements == forward.elements == backward.elements == head.numel()


@pytest.mark.parametrize("use", ["selection", "evaluation"])
def test_no_tensor_exceeds_a_tile(monkeypatch, use):
    """552 positions of a vocabulary of 5,003 would be 2.8 million logits; a tile here has 33 thousand."""
    monkeypatch.setattr(tiles, "TRAINING_TILE", {"cpu": (32, 1000)})
    monkeypatch.setattr(support_selection, "_COLUMNS", {"cpu": 1024})
    monkeypatch.setattr(support_selection, "_TILE_ELEMENTS", {"cpu": 6 * 5120})
    model = tiny_model("qwen3", vocab_size=5003)
    batch = make_batch(vocabulary=5003, batch=24, length=24)
    batch["labels"] = batch["input_ids"]
    add_sparse_lm_head(model)
    with torch.no_grad():
        token_ids = model(**batch, fused_lm_head=True, support_size=16).token_ids
    recorder = _LargestTensor(model.lm_head.weight.numel())
    with recorder:
        if use == "selection":
            with torch.no_grad():
                model(**batch, fused_lm_head=True, support_size=16)
        else:
            output = model(**batch, fused_lm_head=True, token_ids=token_ids)
            (output.sparse_log_probs.exp().sum() + output.entropy.sum()).backward()
    size, operation = recorder.largest
    assert 0 < size <= 34_000, f"{operation} made a tensor of {size} elements"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"support_size": 332}, "`support_size` must be a whole number in 1…331 .*got 332"),
        ({"support_size": 0}, "in 1…331 .*got 0"),
        ({"tail_mass": 0.1}, "`tail_mass` needs `support_size`"),
        ({"token_ids": torch.full((3, 8, 1), 331)}, "`token_ids` must be in -1…330, got 331"),
        ({"support_size": 4, "tail_mass": 1.0}, r"`tail_mass` must be in \[0, 1\), got 1.0"),
        ({"support_size": 4, "token_ids": torch.zeros(3, 8, 1, dtype=torch.int32)}, "either"),
        ({"token_ids": torch.zeros(3, 8, 1, dtype=torch.int32)}, "Slot 0 of `token_ids` must be the label.*got 0"),
        ({"token_ids": torch.zeros(3, 9, 1, dtype=torch.int32)}, "at most the length"),
        ({"support_size": 4, "labels": None}, "need `labels`"),
        ({"support_size": 4, "fused_lm_head": False}, "fused_lm_head=True"),
    ],
)
def test_bad_calls_are_refused(arguments, message):
    model, batch = make_model("qwen3"), make_batch()
    add_sparse_lm_head(model)
    with pytest.raises(ValueError, match=message):
        model(**{**batch, "fused_lm_head": True, **arguments})


@pytest.mark.parametrize("name", ["qwen3", "phi_head_bias"])
def test_a_keyword_that_nothing_reads_is_refused(name):
    """The backbone takes any keyword: a `sampling_mask`, as TRL after 1.16 may give, had no effect."""
    model, batch = make_model(name), make_batch()
    add_sparse_lm_head(model)
    selection = {"fused_lm_head": True, "support_size": 4}
    with pytest.raises(TypeError, match=f"`sampling_mask`, which neither it nor {type(model).__name__}.forward names"):
        model(**batch, **selection, sampling_mask=batch["labels"])
    unread = {"sampling_mask": None, "num_items_in_batch": 3, "output_router_logits": False, "token_type_ids": 1}
    assert torch.equal(model(**batch, **selection, **unread).log_probs, model(**batch, **selection).log_probs)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_logits_are_refused(value, grad):
    model, batch = make_model("llama_untied"), make_batch()
    add_sparse_lm_head(model)
    with torch.no_grad():
        model.lm_head.weight[300] = value
    with pytest.raises(ValueError, match="not finite"), torch.set_grad_enabled(grad):
        model(**batch, fused_lm_head=True, support_size=4)


def model_of(config):
    """What `add_sparse_lm_head` reads of a model before it changes anything."""
    return types.SimpleNamespace(forward=None, config=config)


def with_a_scale_in_its_head():
    """As Dory's, whose scales are 1 until the first update: the check at the first rollout found nothing."""
    model = make_model("phi_head_bias")
    model.lm_head.logit_scale = torch.nn.Parameter(torch.ones(model.config.vocab_size))
    return model


WITHOUT_BACKBONE = Llama4TextConfig(**SMALL, intermediate_size_mlp=32, num_local_experts=2)
WITH_LAYERS = (BertConfig, RobertaConfig, ElectraConfig, RemBertConfig, ModernBertDecoderConfig)
REFUSED = [
    (lambda: model_of(RecurrentGemmaConfig(logits_soft_cap=30.0)), "recurrent_gemma .* through `logits_soft_cap`"),
    (lambda: model_of(MptConfig()), "A mpt model changes its logits.*which neither the LM head"),
    (lambda: AutoModelForCausalLM.from_config(WITHOUT_BACKBONE), "A Llama4ForCausalLM names no backbone"),
    (with_a_scale_in_its_head, "head of the PhiForCausalLM, a Linear, has `logit_scale` besides a weight"),
    *((lambda c=c: model_of(c(is_decoder=True)), f"A {c.model_type} model has layers between") for c in WITH_LAYERS),
    # The kernels take the largest product for the largest logit
    *((lambda x=x: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=x)), f"by {x}. The scale must be positive")
      for x in (-1.0, 0.0)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_model_whose_logits_the_head_would_get_wrong_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        add_sparse_lm_head(make())


def test_non_positive_temperature_is_refused():
    with pytest.raises(ValueError, match=r"`temperature` must be positive, got 0\.0"):
        add_sparse_lm_head(make_model("qwen3"), 0.0)


# A unit is gathered by the forward of its modules, of which the head's is never called. Accelerate gives the head one
# with the final norm, or, where it finds none, one of its own.
UNITS = {
    "of the model": lambda model: [],
    "with the norm": lambda model: [[model.model.norm, model.lm_head]],
    "alone": lambda model: [model.lm_head],
    "tied": lambda model: [[model.model.embed_tokens, model.lm_head]],
}


def log_probs_and_gradients(mesh, units, tied, passes):
    """Of the model sharded in `units`; of the whole model without them, as the mean of the ranks."""
    model = tiny_model("qwen3", tie_word_embeddings=tied)
    add_sparse_lm_head(model)
    if units is not None:
        for unit in [*model.model.layers, *units(model)]:
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in model.parameters())
    for ids in (torch.arange(40) + 17 * dist.get_rank() + 5 * n + 5 for n in range(passes)):
        ids = ids.view(4, 10)
        with torch.no_grad():
            scored = model(input_ids=ids, labels=ids, fused_lm_head=True, support_size=8)
        output = model(input_ids=ids, labels=ids, fused_lm_head=True, token_ids=scored.token_ids)
        (output.sparse_log_probs.exp() ** 2).sum().backward()
    grads = [p.grad for p in model.parameters()]
    if units is not None:
        return [scored.sparse_log_probs, *(grad.full_tensor() for grad in grads)]
    for grad in grads:
        dist.all_reduce(grad)
    return [scored.sparse_log_probs, *(grad / 2 for grad in grads)]


def compare_sharded_with_whole():
    mesh = init_device_mesh("cpu", (2,))
    for (where, units), passes in product(UNITS.items(), (1, 2)):  # gradients of a second pass are added
        whole = log_probs_and_gradients(mesh, None, where == "tied", passes)
        sharded = log_probs_and_gradients(mesh, units, where == "tied", passes)
        for a, b in zip(sharded, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda text, at=where: f"{at}: {text}")
    print("sharded head agrees", flush=True)


@pytest.mark.slow
def test_sharded_by_fsdp2(tmp_path):
    """
    Two processes with other batches, wherever the head is sharded: the same log-probabilities as the whole model, and
    the mean of the ranks' gradients.
    """
    said = in_two_ranks(compare_sharded_with_whole, log=tmp_path / "log.txt")
    assert said.count("sharded head agrees") == 2, said[-3000:]
