"""Model cards: the papers of the trust regions, and the name of a model from a local folder."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # TRL's trainer, which follows in the list of bases
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object

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


class NamesLocalModel(_Trainer):
    """Mixin for a TRL trainer whose model card names the folder of a local model. TRL's card says "None"."""

    def create_model_card(self, *args, **kwargs):
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            card = Path(self.args.output_dir, "README.md")
            name = Path(self.model.config.name_or_path).name or "a local model"
            text = card.read_text(encoding="utf-8").replace("[None](https://huggingface.co/None)", name)
            card.write_text(text, encoding="utf-8")
