"""mosec with batching: up to 16 rows, at most 1 ms of waiting."""

import os

import numpy as np
import onnxruntime
from mosec import Server, Worker


class Infer(Worker):
    def __init__(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(os.environ["MODEL"], options)

    def forward(self, data):
        rows = np.asarray([body["data"][0] for body in data], dtype=np.float32)
        return [{"prediction": [row]} for row in self.session.run(None, {"x": rows})[0].tolist()]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Infer, num=1, max_batch_size=16, max_wait_time=1, route="/predict")
    server.run()
