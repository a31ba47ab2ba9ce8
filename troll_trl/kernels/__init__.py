"""Operations on a tile or a row: each file has a Triton kernel and its PyTorch fallback, which the projection has in
`trust_region`. May import only torch and Triton."""
