"""The two passes of the sparse LM head over vocabulary tiles: selecting a support, and evaluating a policy on one."""
