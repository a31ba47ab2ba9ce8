"""
Evaluate models on math benchmarks, score a file of samples, or compare two evaluations.

    python scripts/evaluate.py --config configs/eval/paper.yaml --model outputs/run --output outputs/eval
"""

from troll_trl.cli.evaluate import main

if __name__ == "__main__":
    main()
