"""Reports on training runs: reads their logs, groups seeds, draws figures and tables. May import `evaluation`, for its
statistics and tables, and packages below it. Loads no torch."""
