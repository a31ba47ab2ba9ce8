"""What training runs did: their `trainer_state.json` read, grouped by configuration, drawn and tabulated. May import
`trainers`, for the defaults of their settings."""
