"""KServe's Python server, v1 protocol; it does not batch by itself."""

import kserve
import numpy as np
from kit_peer import PORT, session


class Model(kserve.Model):
    def __init__(self, name):
        super().__init__(name)
        self.model = session()
        self.ready = True

    async def predict(self, payload, headers=None, response_headers=None):
        rows = np.asarray(payload["instances"], dtype=np.float32)
        return {"predictions": self.model.run(None, {"x": rows})[0].tolist()}


if __name__ == "__main__":
    kserve.ModelServer(http_port=PORT, grpc_port=PORT + 1, workers=1).start([Model("model")])
