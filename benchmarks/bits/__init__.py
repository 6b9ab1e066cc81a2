"""Whether answers have the bits of the isolated prompt: what is asked, watched and counted.

`tests/deterministic` draws what is asked with hypothesis, `benchmarks.deterministic` with numpy;
both drive `Histories`, and both see the same comparisons.
"""
