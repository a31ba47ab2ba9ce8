"""TRL's own trainers, as `troll grpo --method clip` trains with them: a fair comparison samples and counts as TROLL."""

from trl import GRPOTrainer, RLOOTrainer

from troll_trl.trainers.evaluation_means import CountedEvaluation
from troll_trl.trainers.rollout_sampling import SampledAsConfigured, warn_of_unused_options
from troll_trl.trainers.trl_compat import with_parameters_of


class ClipGRPOTrainer(CountedEvaluation, SampledAsConfigured, GRPOTrainer):
    """TRL's trainer and its loss; only rollouts without vLLM and the means of an evaluation are TROLL's."""

    @with_parameters_of(GRPOTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        warn_of_unused_options(self.model, getattr(self, "generation_config", None))


class ClipRLOOTrainer(CountedEvaluation, SampledAsConfigured, RLOOTrainer):
    """TRL's trainer and its loss, changed as [`ClipGRPOTrainer`] is."""

    @with_parameters_of(RLOOTrainer.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        warn_of_unused_options(self.model, getattr(self, "generation_config", None))
