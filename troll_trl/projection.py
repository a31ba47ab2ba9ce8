"""The projection under its public name; it lives in `troll_trl.trust_region.projection`."""

from troll_trl.trust_region.projection import Projection, kl_divergence, project, solve

__all__ = ["Projection", "kl_divergence", "project", "solve"]
