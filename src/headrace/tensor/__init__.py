"""Tensors, signatures and the one codec for them: Open Inference Protocol, JSON and binary, on every wire."""

from headrace.tensor.binary import tensor_from_bytes, tensor_to_bytes
from headrace.tensor.datatypes import Datatype, Tensor
from headrace.tensor.decode import ID_LENGTH_MAX, decode_answer, decode_request
from headrace.tensor.encode import answer_object, digest_inputs, encode_answer, encode_request
from headrace.tensor.infer import InferAnswer, InferRequest, RequestedOutput
from headrace.tensor.signature import Signature, TensorSpec
from headrace.tensor.values import tensor_from_json, tensor_in_object, tensor_to_json

__all__ = [
    "ID_LENGTH_MAX",
    "Datatype",
    "InferAnswer",
    "InferRequest",
    "RequestedOutput",
    "Signature",
    "Tensor",
    "TensorSpec",
    "answer_object",
    "decode_answer",
    "decode_request",
    "digest_inputs",
    "encode_answer",
    "encode_request",
    "tensor_from_bytes",
    "tensor_from_json",
    "tensor_in_object",
    "tensor_to_bytes",
    "tensor_to_json",
]
