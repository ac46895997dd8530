"""HTTP: limits, ids, errors, the access log and the routes."""
