"""From settings to running services: what each is made of, in which order it starts, and in which it stops."""

from headrace.assembly.instance import CannotStart, Instance, run_service
from headrace.assembly.sections import SECTIONS, load_settings

__all__ = ["SECTIONS", "CannotStart", "Instance", "load_settings", "run_service"]
