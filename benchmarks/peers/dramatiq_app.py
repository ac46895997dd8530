"""Dramatiq with Redis, defaults, one onnxruntime session per process."""

import os

import dramatiq
import numpy as np
import onnxruntime
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

broker = RedisBroker(url=os.environ["REDIS"] + "/0")
broker.add_middleware(Results(backend=RedisBackend(url=os.environ["REDIS"] + "/1")))
dramatiq.set_broker(broker)
_session = None


@dramatiq.actor(store_results=True)
def infer(row):
    global _session
    if _session is None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        _session = onnxruntime.InferenceSession(os.environ["MODEL"], options)
    return _session.run(None, {"x": np.asarray([row], dtype=np.float32)})[0][0].tolist()
