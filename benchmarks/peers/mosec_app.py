"""mosec with batching, up to 16 rows."""

import numpy as np
from kit_peer import BATCH_MAX, WAIT_S, session
from mosec import Server, Worker


class Infer(Worker):
    def __init__(self):
        self.model = session()

    def forward(self, data):
        rows = np.asarray([body["data"][0] for body in data], dtype=np.float32)
        return [{"prediction": [row]} for row in self.model.run(None, {"x": rows})[0].tolist()]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Infer, num=1, max_batch_size=BATCH_MAX, max_wait_time=int(WAIT_S * 1000), route="/predict")
    server.run()
