class GuardedTrainer:
    guard = None
