"""MLServer's model class; `mlserver start FOLDER` finds it through model-settings.json."""

from kit_peer import session
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Model(MLModel):
    async def load(self) -> bool:
        self.model = session()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0]).astype("f4", copy=False)
        found = self.model.run(None, {"x": rows})[0]
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", found)])
