"""
Evaluate models on math benchmarks, score a file of samples, or compare two evaluations.

    python scripts/evaluate.py --config configs/eval/paper.yaml --model outputs/run --output outputs/eval
    python scripts/evaluate.py --model A B --benchmarks gsm8k mine=problems.jsonl --n 8 --temperature 0.6 --output DIR
    python scripts/evaluate.py --samples samples.jsonl --output DIR
    python scripts/evaluate.py --compare DIR_A DIR_B
"""

import sys

from troll_trl.evaluation.arguments import parse_evaluation_args
from troll_trl.evaluation.runner import generate_samples


def main():
    args = parse_evaluation_args()
    try:
        generate_samples(args, print)
    except (ValueError, OSError, ImportError) as error:  # what a user can set right, without a traceback
        print(f"evaluate.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
