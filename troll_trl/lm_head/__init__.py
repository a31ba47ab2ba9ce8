"""The streaming LM head: a model's distribution on a few tokens, without a (tokens, vocabulary) tensor. May import
`kernels` and `trust_region`."""

from troll_trl.lm_head.patch import SparseCausalLMOutput, add_sparse_lm_head

__all__ = ["SparseCausalLMOutput", "add_sparse_lm_head"]
