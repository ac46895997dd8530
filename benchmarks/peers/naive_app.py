"""What people write by hand first: FastAPI, one handler, one session."""

import os

import numpy as np
import onnxruntime
from fastapi import FastAPI

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(os.environ["MODEL"], options)
app = FastAPI()


@app.post("/predict")
def predict(body: dict):
    rows = np.asarray(body["data"], dtype=np.float32)
    return {"prediction": session.run(None, {"x": rows})[0].tolist()}
