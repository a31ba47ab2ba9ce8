"""What training runs did: their `trainer_state.json` read, grouped by configuration, drawn and tabulated."""
