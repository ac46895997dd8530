"""Ray Serve with its batching, up to 16 rows."""

import time

import numpy as np
import ray
from kit_peer import BATCH_MAX, PORT, WAIT_S, session
from ray import serve
from starlette.requests import Request


@serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 1})
class Model:
    def __init__(self):
        self.model = session()

    @serve.batch(max_batch_size=BATCH_MAX, batch_wait_timeout_s=WAIT_S)
    async def infer(self, rows):
        return list(self.model.run(None, {"x": np.stack(rows)})[0])

    async def __call__(self, request: Request):
        body = await request.json()
        row = await self.infer(np.asarray(body["data"][0], dtype=np.float32))
        return {"prediction": [row.tolist()]}


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(Model.bind(), route_prefix="/predict")
    while True:
        time.sleep(3600)
