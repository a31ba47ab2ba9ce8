"""Features that may change in any release, tied to one minor version of TRL. May import `trainers` and the
packages below it."""
