"""Engines under one small protocol, each in a process of its own (`python -m benchmarks.engines`).

An engine answers commands, one JSON object a line on standard input, with one line each:
`one` (milliseconds of single requests, one after the other), `replay` (of the GPU alone), `closed`
(a closed loop of some clients), and what only some of them know.
"""
