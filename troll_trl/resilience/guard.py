class GuardedTrainer: guard = None
