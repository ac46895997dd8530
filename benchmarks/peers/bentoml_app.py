"""BentoML with its adaptive batching."""

import bentoml
import numpy as np
from kit_peer import BATCH_MAX, session


@bentoml.service(workers=1)
class Service:
    def __init__(self):
        self.model = session()

    @bentoml.api(batchable=True, max_batch_size=BATCH_MAX, max_latency_ms=10_000)
    def predict(self, data: np.ndarray) -> np.ndarray:
        return self.model.run(None, {"x": data.astype("f4", copy=False)})[0]
