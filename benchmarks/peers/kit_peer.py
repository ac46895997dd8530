"""What the peers' servers share: one session with one thread, as every peer here runs it."""

import os

import onnxruntime

DIMENSION, OUTPUTS = int(os.environ["DIMENSION"]), int(os.environ["OUTPUTS"])
PORT = int(os.environ["PORT"])
BATCH_MAX, WAIT_S = 16, float(os.environ.get("WAIT_MS", "5")) / 1000


def session() -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(os.environ["MODEL"], options, providers=["CPUExecutionProvider"])
