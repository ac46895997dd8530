"""What people write by hand first: FastAPI, one handler, one session."""

import numpy as np
from fastapi import FastAPI
from kit_peer import session

model = session()
app = FastAPI()


@app.post("/predict")
def predict(body: dict):
    rows = np.asarray(body["data"], dtype=np.float32)
    return {"prediction": model.run(None, {"x": rows})[0].tolist()}
