"""The method: the projection onto the KL trust region, and the sparse distribution that it works on.
Imports neither TRL nor transformers, and no other room."""
