"""What may change with any release, tied to one minor version of TRL. May import `trainers` and what is below it."""
