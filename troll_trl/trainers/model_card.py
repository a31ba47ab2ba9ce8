"""The papers of the trust regions, as TRL's model cards name them."""

import textwrap

TROLL = {
    "title": "TROLL: Trust Regions improve Reinforcement Learning for Large Language Models",
    "id": "2510.03817",
    "citation": textwrap.dedent("""\
        @article{becker2025troll,
            title        = {{TROLL: Trust Regions improve Reinforcement Learning for Large Language Models}},
            author       = {Becker, Philipp and Freymuth, Niklas and Thilges, Serge and Otto, Fabian and
                            Neumann, Gerhard},
            year         = 2025,
            eprint       = {arXiv:2510.03817},
        }"""),
}
DPPO = {
    "title": "Rethinking the Trust Region in LLM Reinforcement Learning",
    "id": "2602.04879",
    "citation": textwrap.dedent("""\
        @article{qi2026rethinking,
            title        = {{Rethinking the Trust Region in LLM Reinforcement Learning}},
            author       = {Qi, Penghui and Zhou, Xiangxin and Liu, Zichen and Pang, Tianyu and Du, Chao and Lin, Min
                            and Lee, Wee Sun},
            year         = 2026,
            eprint       = {arXiv:2602.04879},
        }"""),
}
