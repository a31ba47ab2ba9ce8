"""What keeps a long run alive: a guard against numbers that are not finite, exact checkpoints, checks of rollouts.
Imports no other package of this project. A trainer names in `stateful` what its checkpoints contain besides TRL's."""
