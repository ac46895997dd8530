"""Triton through PyTriton, with its dynamic batcher."""

import numpy as np
from kit_peer import BATCH_MAX, DIMENSION, OUTPUTS, PORT, WAIT_S, session
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

model = session()


@batch
def infer(x):
    return [model.run(None, {"x": x})[0]]


if __name__ == "__main__":
    config = TritonConfig(
        http_port=PORT,
        grpc_port=PORT + 1,
        metrics_port=PORT + 2,
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="model",
            infer_func=infer,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(DIMENSION,))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(OUTPUTS,))],
            config=ModelConfig(
                max_batch_size=BATCH_MAX, batcher=DynamicBatcher(max_queue_delay_microseconds=int(WAIT_S * 1e6))
            ),
        )
        triton.serve()
