"""What keeps a long run alive: a guard against numbers that are not finite, exact checkpoints, checks of rollouts.
Imports no other package of this project, and reads only attributes of TRL's and transformers' trainers."""
