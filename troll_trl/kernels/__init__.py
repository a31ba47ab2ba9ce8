"""Operations on a tile or a row. Each file has a Triton kernel and its PyTorch fallback, except that the projection's
fallback is in `trust_region`. May import only torch and Triton."""
