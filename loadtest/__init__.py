"""Load tests over HTTP and over Ray handles, from one set of workloads, with a report per run."""
