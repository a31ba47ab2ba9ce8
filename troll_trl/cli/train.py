"""
Train a language model with TROLL, or with TRL's clip, on problems with known answers.

    troll grpo --config qwen3-0.6b/gsm8k --learning_rate 2e-6
    accelerate launch --num_processes 8 -m troll_trl.cli.train --config qwen3-0.6b/gsm8k --method clip --output_dir out
"""

from collections.abc import Sequence

from troll_trl.cli.settings.command import read_training_command


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """
    Train, in this process.

    Args:
        argv (`Sequence[str]`, *optional*):
            Flags; those of the process by default.
        program (`str`, *optional*):
            Name in messages; that of the process by default.

    Raises:
        SystemExit: with code 2 and one message for what a user can set right; with 1 where numbers were not finite.
    """
    command = read_training_command(argv, program)
    from troll_trl.cli import training  # torch, transformers and TRL, seconds after a mistyped name is told

    training.run(command)


if __name__ == "__main__":
    main()
