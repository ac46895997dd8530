"""Celery with Redis, defaults, one onnxruntime session per process."""

import os

import numpy as np
import onnxruntime
from celery import Celery

app = Celery("celery_app", broker=os.environ["REDIS"] + "/0", backend=os.environ["REDIS"] + "/1")
_session = None


@app.task
def infer(row):
    global _session
    if _session is None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        _session = onnxruntime.InferenceSession(os.environ["MODEL"], options)
    return _session.run(None, {"x": np.asarray([row], dtype=np.float32)})[0][0].tolist()
