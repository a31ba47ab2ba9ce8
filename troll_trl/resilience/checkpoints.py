class CheckpointedTrainer:
    pass
