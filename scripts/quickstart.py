"""Quickstart: train a small Qwen3 model on sums with TROLL and with TRL's trainer, from equally many completions."""

from troll_trl.cli.quickstart import main

if __name__ == "__main__":
    main()
