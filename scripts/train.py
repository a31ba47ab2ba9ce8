"""
Train a language model with TROLL, or with TRL's clip, on problems with known answers.

    python scripts/train.py --config configs/qwen3-0.6b/gsm8k.yaml --learning_rate 2e-6
    accelerate launch --config_file configs/accelerate/ddp.yaml scripts/train.py --config ... --method clip
"""

from troll_trl.cli.train import main

if __name__ == "__main__":
    main()
