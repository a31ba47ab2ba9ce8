"""Quickstart: a small Qwen3 model that solves some sums is trained with TROLL until it solves most of them."""

from troll_trl.cli.quickstart import main

if __name__ == "__main__":
    main()
