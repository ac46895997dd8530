"""LitServe with batching, up to 16 rows."""

import litserve
import numpy as np
from kit_peer import BATCH_MAX, PORT, WAIT_S, session


class Api(litserve.LitAPI):
    def setup(self, device):
        self.model = session()

    def decode_request(self, request):
        return np.asarray(request["data"][0], dtype=np.float32)

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, rows):
        return self.model.run(None, {"x": rows})[0]

    def unbatch(self, rows):
        return list(rows)

    def encode_response(self, row):
        return {"prediction": [row.tolist()]}


if __name__ == "__main__":
    api = Api(max_batch_size=BATCH_MAX, batch_timeout=WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=PORT, generate_client_file=False)
