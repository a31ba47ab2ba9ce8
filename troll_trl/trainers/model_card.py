"""The part of a model card on the trust region: its options, its paper, and the version of this package."""

import textwrap
from pathlib import Path
from typing import Any

import troll_trl

_TROLL = textwrap.dedent("""\
    @article{becker2025troll,
        title        = {{TROLL: Trust Regions improve Reinforcement Learning for Large Language Models}},
        author       = {Becker, Philipp and Freymuth, Niklas and Thilges, Serge and Otto, Fabian and
                        Neumann, Gerhard},
        year         = 2025,
        eprint       = {arXiv:2510.03817},
    }""")
_DPPO = textwrap.dedent("""\
    @article{qi2026rethinking,
        title        = {{Rethinking the Trust Region in LLM Reinforcement Learning}},
        author       = {Qi, Penghui and Zhou, Xiangxin and Liu, Zichen and Pang, Tianyu and Du, Chao and Lin, Min and
                        Lee, Wee Sun},
        year         = 2026,
        eprint       = {arXiv:2602.04879},
    }""")


def paper_of(trainer: type, mask: bool = False) -> dict[str, str]:
    """The paper of a trust region for a model card, with its citation and TRL's trainer's."""
    title, number, citation = (
        ("Rethinking the Trust Region in LLM Reinforcement Learning", "2602.04879", _DPPO)
        if mask
        else ("TROLL: Trust Regions improve Reinforcement Learning for Large Language Models", "2510.03817", _TROLL)
    )
    trl_citation = trainer._paper["citation"]  # type: ignore[attr-defined]
    return {"title": title, "id": number, "citation": f"{citation}\n\n{trl_citation}"}


def add_trust_region(folder: str, options: dict[str, Any]) -> None:
    """Add the options of the trust region, and this package's version, to the model card in `folder`."""
    said = ", ".join(f"`{name}` {value}" for name, value in options.items())
    card = Path(folder, "README.md")
    heading, versions = f"### Trust region\n\n{said}.\n", f"- troll_trl: {troll_trl.__version__}\n"
    text = card.read_text(encoding="utf-8")
    before, found, after = text.partition("### Framework versions\n\n")
    text = f"{before}{heading}\n{found}{versions}{after}" if found else f"{text}\n{heading}\n{versions}"
    card.write_text(text, encoding="utf-8")
