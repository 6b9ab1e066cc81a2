"""For operators: a Grafana dashboard and example alert rules over `deployments.metrics`."""
