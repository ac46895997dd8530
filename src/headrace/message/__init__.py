"""Message and Result, their ids, their bytes and their CloudEvents attributes.

Nothing in this room reads the clock or keeps a secret: time and secret are passed in.
"""

from headrace.message.cloudevents import (
    dead_letter_headers,
    message_from_headers,
    message_headers,
    result_data,
    result_from_headers,
    result_headers,
    sound_traceparent,
)
from headrace.message.encoding import decode_message, decode_result, encode_message, encode_result, stored_result
from headrace.message.ids import check_id, id_time_ms, keyed_id, new_id
from headrace.message.records import SCHEMA, Dispatch, ErrorRecord, Message, Result

__all__ = [
    "SCHEMA",
    "Dispatch",
    "ErrorRecord",
    "Message",
    "Result",
    "check_id",
    "dead_letter_headers",
    "decode_message",
    "decode_result",
    "encode_message",
    "encode_result",
    "id_time_ms",
    "keyed_id",
    "message_from_headers",
    "message_headers",
    "new_id",
    "result_data",
    "result_from_headers",
    "result_headers",
    "sound_traceparent",
    "stored_result",
]
