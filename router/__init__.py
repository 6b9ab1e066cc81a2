"""From an HTTP request to a chosen replica. Never loads torch."""
