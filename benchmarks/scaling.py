"""How TROLL's overhead over TRL's clip grows with sequence length, vocabulary, support and batch.

    python benchmarks/scaling.py

One figure is one update without the optimizer: forward of a random Qwen3 with the LM head, loss, backward. TROLL's loss
evaluates the policy on a stored support, projects it and adds the regression; the clip's uses TRL's fused head.
Temperature 0.05 makes the distributions as peaked as a trained model's. The old policy is the policy with noise on its
log-probabilities, and "projected" is the share of tokens outside of the bound. head.py and step.py time the pass that
scores a rollout; this script does not. One of the four sizes varies at a time. "cache" is the bytes of the old policy
per token.

Floor: 6 FLOPs per weight and token.
"""

import torch
from common import MIB, Floor, Report, paired_seconds, parser, peak_bytes, ratio
from step import make_model
from trl.trainer.utils import add_fused_lm_head

from troll_trl import project
from troll_trl.lm_head import add_sparse_lm_head
from troll_trl.trust_region.projection import kl_divergence

# Shape; then sequence lengths, vocabularies, supports and batch sizes, of which the first stands where another varies
SIZES = {
    "cuda": ("qwen3-0.6b", [2048, 512, 1024, 4096, 8192], [151_936, 32_000, 262_144], [64, 16, 256], [4, 1, 2, 8]),
    "cpu": ("small", [128, 64, 256], [151_936, 32_000, 262_144], [64, 16, 256], [1, 2]),
}
BOUND, TEMPERATURE = 0.05, 0.05


class Update:
    """One model, one batch, and one update's forward and backward with either loss."""

    def __init__(self, device: str, shape: str, length: int, vocabulary: int, support: int, batch: int):
        self.model = make_model(shape, vocabulary, device)
        add_fused_lm_head(self.model, TEMPERATURE, outputs=("log_probs", "entropy"))
        add_sparse_lm_head(self.model, TEMPERATURE)
        ids = torch.randint(vocabulary, (batch, length + 1), device=device)
        self.call = {"input_ids": ids, "labels": ids, "fused_lm_head": True}
        with torch.no_grad():
            scored = self.model(**self.call, support_size=support)
        self.token_ids = scored.token_ids
        noise = torch.linspace(0.0, 0.6, length, device=device).view(1, -1, 1)
        self.old = (scored.sparse_log_probs + noise * torch.randn_like(scored.sparse_log_probs)).log_softmax(-1)
        self.cache = self.token_ids.shape[-1] * 8 + 4
        self.weights = sum(x.numel() for x in self.model.parameters())

    def troll(self) -> None:
        policy = self.model(**self.call, token_ids=self.token_ids).sparse_log_probs
        projection = project(policy, self.old, BOUND)
        self.projected = (projection.eta > 0).float().mean()
        ratio = (projection.log_probs[..., 0] - self.old[..., 0]).exp()
        self._backward(kl_divergence(policy, projection.log_probs.detach()) - ratio)

    def clip(self) -> None:
        ratio = (self.model(**self.call).log_probs - self.old[..., 0]).exp()
        self._backward(-torch.minimum(ratio, ratio.clamp(0.8, 1.2)))

    def _backward(self, loss: torch.Tensor) -> None:
        loss.mean().backward()
        self.model.zero_grad(set_to_none=True)


def main() -> None:
    args = parser(__doc__).parse_args()
    shape, *axes = SIZES[args.device]
    columns = {"length": ",", "V": ",", "K": "", "batch": ""}
    columns |= {"time/clip": ".3f", "ratio_min": ".3f", "ratio_max": ".3f"}
    columns |= {"memory/clip": ".3f", "troll MiB": ".0f", "cache B/token": "", "projected": ".0%"}
    columns |= {"troll s": ".3f", "floor s": ".3f", "troll/floor": ".2f"}
    report = Report("scaling", args, columns)
    floor = Floor(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    report.start(f"{floor}. {shape}.")
    centre = [axis[0] for axis in axes]
    sizes = [centre] + [[*centre[:i], x, *centre[i + 1 :]] for i, axis in enumerate(axes) for x in axis[1:]]
    for length, vocabulary, support, batch in sizes:
        update = Update(args.device, shape, length, vocabulary, support, batch)
        runs = {"troll": update.troll, "clip": update.clip}
        seconds = paired_seconds(runs, args.repeats, args.device)
        memory = {name: peak_bytes(run, args.device) for name, run in runs.items()}
        pairs = ratio(seconds["troll"], seconds["clip"])
        least = floor.seconds(6 * update.weights * batch * length, 0)
        took = sorted(seconds["troll"])[args.repeats // 2]
        report.add(
            **{"length": length, "V": vocabulary, "K": support, "batch": batch, "time/clip": pairs["ratio"], **pairs},
            **{"memory/clip": memory["troll"] / memory["clip"], "troll MiB": memory["troll"] / MIB},
            **{"cache B/token": update.cache, "projected": update.projected.item()},
            **{"troll s": took, "floor s": least, "troll/floor": took / least},
            seconds=seconds,
            peak_bytes=memory,
        )
    report.save()


if __name__ == "__main__":
    main()
