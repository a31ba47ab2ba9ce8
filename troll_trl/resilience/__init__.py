"""What keeps a long run alive: numbers that are not finite, exact checkpoints, checks of the input. Imports no other package
of this project, and knows the attributes of TRL's and transformers' trainers alone."""
