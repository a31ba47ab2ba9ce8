"""Operations on a tile or a row: each file has a Triton kernel and its PyTorch fallback. May import torch and Triton
alone."""
