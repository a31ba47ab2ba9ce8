"""What keeps a long run alive: numbers that are not finite, exact checkpoints, checks of rollouts. Imports no other
package of this project, and reads attributes of TRL's and transformers' trainers alone."""
