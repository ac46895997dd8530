"""Child processes: started, watched, restarted, stopped in order. Used by `up`, and later by model runners.

A child stays in its parent's session and process group, so that a terminal, a container and a person with `kill` find
the whole family together. The two ends talk over one inherited socket: the child says that it is ready and alive, the
parent says when to stop, and either hears at once when the other dies.
"""

from headrace.supervise.descendants import end_descendants
from headrace.supervise.heartbeat import Heartbeat
from headrace.supervise.restarts import Restarts
from headrace.supervise.settings import HeartbeatSettings
from headrace.supervise.slot import Child
from headrace.supervise.supervisor import Supervisor

__all__ = ["Child", "Heartbeat", "HeartbeatSettings", "Restarts", "Supervisor", "end_descendants"]
