"""Every metric, log line and span, with its fields: what dashboards, alerts and people may rely on."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["CHOICES", "LEVELS", "LINES", "METRICS", "OTHER", "SPANS", "LineRow", "MetricRow"]

Kind = Literal["counter", "gauge", "age", "histogram"]

#: What a label says for a value that is not one of its choices, or comes after too many others.
OTHER = "other"


class MetricRow(NamedTuple):
    """One metric. `age` is a gauge of the seconds since something was last marked."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    doc: str
    bounds: tuple[float, ...] = ()


class LineRow(NamedTuple):
    """One log line: how serious it is, what it always has, and what it means for the reader."""

    name: str
    level: Literal["debug", "info", "warning", "error"]
    fields: tuple[str, ...]
    doc: str


LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

#: Labels whose values are a closed list; the others (model, version, loop) are capped in number.
CHOICES: dict[str, frozenset[str]] = {
    "method": frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")),
}

_HTTP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 30, 60)
_WAIT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 14400)
_RUN = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_DISK = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

METRICS: tuple[MetricRow, ...] = (
    # -- the data listener
    MetricRow(
        "headrace_http_requests_total",
        "counter",
        ("route", "method", "status"),
        "Answers by route template (`other`: no route matched), method and HTTP status. A gRPC call is a POST to its "
        "method's path, with the status that HTTP would have given.",
    ),
    MetricRow(
        "headrace_http_request_duration_seconds",
        "histogram",
        ("route",),
        "First byte in to last byte out, by route template.",
        _HTTP,
    ),
    MetricRow("headrace_http_in_flight", "gauge", (), "Requests that have no answer yet."),
    # -- accepting
    MetricRow("headrace_accepted_total", "counter", ("model",), "Messages accepted: durable, answered with an id."),
    MetricRow(
        "headrace_repeated_keys_total", "counter", ("model",), "Requests whose key named a message accepted before."
    ),
    MetricRow("headrace_rejected_total", "counter", ("code",), "Requests refused before acceptance, by error code."),
    MetricRow(
        "headrace_publish_duration_seconds", "histogram", (), "How long a message took to become durable.", _DISK
    ),
    # -- the topics, measured by ingest
    MetricRow("headrace_topic_waiting", "gauge", ("model",), "Messages that wait to be claimed."),
    MetricRow("headrace_topic_claimed", "gauge", ("model",), "Messages that somebody holds."),
    MetricRow("headrace_topic_oldest_age_seconds", "gauge", ("model",), "Age of the oldest waiting message; 0: none."),
    # -- claiming
    MetricRow("headrace_claims_total", "counter", ("model",), "Messages claimed, repeats included."),
    MetricRow("headrace_claims_repeated_total", "counter", ("model",), "Messages claimed for the second time or more."),
    MetricRow("headrace_claims_lost_total", "counter", ("model",), "Claims that expired under us or were taken away."),
    MetricRow("headrace_claims_held", "gauge", (), "Claims this process holds now."),
    # -- computing
    MetricRow(
        "headrace_queue_time_seconds",
        "histogram",
        ("model",),
        "Accepted (long road) or received (short road) until its batch started.",
        _WAIT,
    ),
    MetricRow("headrace_batch_rows", "histogram", ("model",), "Rows run together.", _ROWS),
    MetricRow("headrace_batch_requests", "histogram", ("model",), "Requests run together.", _ROWS),
    MetricRow(
        "headrace_batch_retries_total", "counter", ("model",), "Failed batches whose members were run again alone."
    ),
    MetricRow("headrace_inference_duration_seconds", "histogram", ("model", "version"), "One run of a batch.", _RUN),
    MetricRow(
        "headrace_inferences_total",
        "counter",
        ("model", "version", "outcome"),
        "Requests that were run, by outcome: `succeeded` or the code of the error.",
    ),
    MetricRow("headrace_busy_seconds_total", "counter", ("model",), "Seconds that runners spent running."),
    MetricRow("headrace_model_ready", "gauge", ("model", "version"), "1 while the version is loaded and warm."),
    MetricRow("headrace_model_load_seconds", "gauge", ("model", "version"), "How long loading and warm-up took."),
    MetricRow(
        "headrace_model_memory_bytes",
        "gauge",
        ("model", "version"),
        "Memory that the version takes, as measured when it was loaded; 0 while it is evicted.",
    ),
    MetricRow("headrace_model_memory_budget_bytes", "gauge", (), "Memory that all versions together may take."),
    MetricRow(
        "headrace_model_evictions_total", "counter", ("model", "version"), "Versions freed because memory was short."
    ),
    MetricRow(
        "headrace_runner_restarts_total", "counter", ("model",), "Runners' processes that are back after they died."
    ),
    # -- results
    MetricRow(
        "headrace_results_total",
        "counter",
        ("model", "outcome"),
        "Results committed: `succeeded` or the code of the error. A result that came second is not counted.",
    ),
    MetricRow("headrace_results_second_total", "counter", ("model",), "Results that found another one there first."),
    MetricRow(
        "headrace_dead_letters_total", "counter", ("kind", "code"), "Dead letters made, of messages and deliveries."
    ),
    MetricRow("headrace_expired_total", "counter", ("model",), "Messages answered unrun because their time was over."),
    MetricRow("headrace_commit_duration_seconds", "histogram", (), "One durable write of results.", _DISK),
    MetricRow(
        "headrace_end_to_end_seconds", "histogram", ("model",), "Accepted until its result was committed.", _WAIT
    ),
    MetricRow("headrace_purged_total", "counter", (), "Results removed because their retention ended."),
    # -- delivering
    MetricRow(
        "headrace_delivery_attempts_total",
        "counter",
        ("sink", "outcome"),
        "Attempts by outcome: `delivered`, `retry`, `gone`, `refused`.",
    ),
    MetricRow("headrace_delivery_duration_seconds", "histogram", ("sink",), "One attempt.", _HTTP),
    MetricRow(
        "headrace_delivery_delay_seconds", "histogram", ("sink",), "Result committed until it was delivered.", _WAIT
    ),
    MetricRow("headrace_deliveries_in_flight", "gauge", (), "Attempts being made now."),
    MetricRow("headrace_outbox_pending", "gauge", (), "(result, destination) pairs still to be delivered."),
    MetricRow("headrace_outbox_dead", "gauge", (), "(result, destination) pairs given up on."),
    # -- the house
    MetricRow("headrace_disk_free_bytes", "gauge", (), "Free space where the data folder is."),
    MetricRow("headrace_up", "gauge", ("service",), "1 while the instance reports; 0 where it has stopped doing so."),
    MetricRow("headrace_restarts_total", "counter", ("service",), "Children started again after they died."),
    MetricRow("headrace_poll_age_seconds", "age", ("loop",), "Seconds since the named loop last came round."),
    MetricRow("headrace_log_lines_dropped_total", "counter", (), "Log lines dropped because nobody read them."),
    MetricRow("headrace_build_info", "gauge", ("version", "python"), "Always 1; what is running."),
    MetricRow("headrace_resident_memory_bytes", "gauge", (), "Memory of the process."),
    MetricRow("headrace_cpu_seconds_total", "counter", (), "Processor time of the process."),
    MetricRow("headrace_open_files", "gauge", (), "File descriptors of the process."),
    MetricRow("headrace_start_time_seconds", "gauge", (), "When the process started, in seconds since 1970."),
)

LINES: tuple[LineRow, ...] = (
    # -- requests
    LineRow(
        "request",
        "info",
        (
            "request_id",
            "model",
            "model_version",
            "input_size",
            "latency_ms",
            "queue_time_ms",
            "status",
            "error",
            "method",
            "route",
            "trace_id",
        ),
        "One HTTP or gRPC request was answered. `error` is the code, null if there is none.",
    ),
    LineRow("request_failed", "error", ("request_id", "error"), "An answer was `internal`: here is its cause."),
    # -- services
    LineRow("starting", "info", ("service", "version"), "A service begins to start."),
    LineRow("ready", "info", ("service",), "A service is ready."),
    LineRow("not_ready", "warning", ("service", "reasons"), "A service is not ready any more."),
    LineRow("listening", "info", ("address",), "A listener is bound."),
    LineRow("stopping", "info", ("service", "reason"), "An orderly stop has begun."),
    LineRow("stopped", "info", ("service",), "An orderly stop is over."),
    LineRow("descendants_ended", "warning", ("service", "processes"), "Processes that a model left behind were ended."),
    LineRow("loop_failed", "error", ("loop", "error"), "A background loop failed; it goes on after a pause."),
    LineRow("settings_loaded", "debug", ("settings",), "The settings in force, secrets hidden."),
    # -- children
    LineRow("child_started", "info", ("child", "pid"), "A child process was started."),
    LineRow("child_ready", "info", ("child", "pid"), "A child process is ready."),
    LineRow("child_died", "warning", ("child", "pid", "reason"), "A child process died."),
    LineRow("child_restarting", "warning", ("child", "delay_s"), "A child process will be started again."),
    LineRow("child_hung", "error", ("child", "pid", "silent_s"), "A child's heartbeat stopped; it is killed."),
    LineRow("child_given_up", "error", ("child", "deaths"), "A child keeps dying before it is ready."),
    # -- models
    LineRow("model_loading", "info", ("model", "model_version"), "A version is being loaded."),
    LineRow("model_loaded", "info", ("model", "model_version", "load_ms"), "A version is loaded and warm."),
    LineRow("model_load_failed", "error", ("model", "model_version", "error"), "A version cannot be loaded."),
    LineRow("model_unloaded", "info", ("model", "model_version"), "A version was unloaded."),
    LineRow(
        "model_evicted",
        "info",
        ("model", "model_version", "idle_s"),
        "A version was freed because memory was short; the next request to it loads it again.",
    ),
    LineRow("runner_died", "error", ("model", "model_version", "reason"), "A runner died and will be replaced."),
    LineRow("runner_back", "info", ("model", "model_version", "pid"), "A runner that died runs again."),
    LineRow(
        "runner_given_up", "error", ("model", "model_version", "deaths"), "A runner keeps dying before it is ready."
    ),
    LineRow(
        "run_failed",
        "error",
        ("model", "model_version", "error"),
        "A run failed and its callers were told; here is the cause. At most one a second for a version.",
    ),
    LineRow("batch_retried", "warning", ("model", "requests", "error"), "A batch failed; its members run alone now."),
    LineRow("card_written", "debug", ("model", "model_version"), "The card of a version was written."),
    LineRow("card_refused", "warning", ("card", "reason"), "A card cannot be read and is passed over."),
    # -- the long road
    LineRow("accepted", "debug", ("id", "model", "request_id"), "A message is durable."),
    LineRow("claimed", "debug", ("id", "model", "attempt"), "A message was claimed."),
    LineRow("claim_lost", "warning", ("id", "model", "reason"), "A claim was lost; whoever has it now goes on."),
    LineRow("claimed_alone", "warning", ("id", "model", "attempt"), "A message that died with us is run alone."),
    LineRow("released", "info", ("id", "model", "reason"), "A claim was given back, to be claimed again."),
    LineRow("finished", "debug", ("id", "model", "outcome", "attempt"), "A result was committed."),
    LineRow("finished_second", "info", ("id", "model"), "A result found another one there first and was dropped."),
    LineRow("dead_letter", "error", ("id", "model", "code", "error", "attempt"), "A message was given up on."),
    LineRow("broker_unavailable", "error", ("error",), "The broker cannot be reached; we keep trying."),
    LineRow("store_unavailable", "error", ("error",), "The store cannot be reached; we keep trying."),
    LineRow("storage_full", "error", ("error",), "The disk is full; nothing new is accepted."),
    LineRow("recovered", "info", ("what",), "What was unavailable is back."),
    LineRow("purged", "info", ("results",), "Results whose retention ended were removed."),
    # -- delivery
    LineRow(
        "delivered",
        "info",
        ("id", "destination", "attempt", "status", "latency_ms"),
        "A destination took a result. Destinations are logged without their query.",
    ),
    LineRow(
        "delivery_failed",
        "warning",
        ("id", "destination", "attempt", "status", "error", "next_in_s"),
        "An attempt failed and will be repeated.",
    ),
    LineRow(
        "delivery_dead",
        "error",
        ("id", "destination", "attempt", "status", "code", "error"),
        "A (result, destination) pair was given up on.",
    ),
    LineRow(
        "destination_disabled", "warning", ("destination", "dead"), "A destination answered 410 and is not asked again."
    ),
    # -- others
    LineRow("library", "warning", ("logger", "text"), "Something that a library logged."),
    LineRow("lines_dropped", "error", ("lines",), "Nobody read our log, so this many lines were dropped."),
    LineRow("span", "debug", ("span", "trace_id", "span_id", "parent_id", "duration_ms"), "One span of a trace."),
)

#: Spans of every trace, in order; one trace crosses the topic.
SPANS: dict[str, str] = {
    "request_received": "From the first byte of a request until it is read, checked and handed on.",
    "message_published": "Making a message durable.",
    "message_claimed": "One claim of a message, from claim to settle; linked to the batch that ran it.",
    "model_loaded": "Loading a version, when that happens.",
    "inference_executed": "One run of a batch; linked to each request in it.",
    "response_sent": "Sending the answer, or one attempt to deliver a result.",
}
