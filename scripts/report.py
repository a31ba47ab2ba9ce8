"""
Report on training runs: one page with figures and a table.

    python scripts/report.py TROLL=out/troll-0,out/troll-1 clip=out/clip-0,out/clip-1 --output out/report
"""

from troll_trl.cli.report import main

if __name__ == "__main__":
    main()
