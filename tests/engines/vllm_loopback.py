"""
A vLLM server's side of a weight transfer over a TCP store in place of NCCL, which needs GPUs. For tiny models: it
pickles. The server imports this file in its workers, before they load the model:

    vllm serve … --host 127.0.0.1 --weight-transfer-config '{"backend": "loopback"}' \
        --worker-extension-cls vllm_loopback.Extension
"""

from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from tests.engines.vllm_engine import plain_linear_layers


class LoopbackEngine(NCCLWeightTransferEngine):
    """vLLM's own engine, with another way for the tensors."""

    def init_transfer_engine(self, init_info):
        rank = init_info.rank_offset + self.parallel_config.rank
        self.model_update_group = StatelessProcessGroup.create(
            init_info.master_address, init_info.master_port, rank, init_info.world_size
        )

    def start_weight_update(self):
        """Nothing: plain layers take weights as they come."""

    finish_weight_update = start_weight_update

    def receive_weights(self, update_info):
        for name in update_info.names:
            self.model.load_weights([(name, self.model_update_group.broadcast_obj(None, 0))])


class Extension:
    """Of the worker's class: adds nothing, but is imported at the right time."""


plain_linear_layers()
if "loopback" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("loopback", LoopbackEngine)
