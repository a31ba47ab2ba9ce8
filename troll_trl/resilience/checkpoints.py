class CheckpointedTrainer: pass
