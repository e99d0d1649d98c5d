"""SGLang behind `InferenceEngine`: colocated in a host process, or as HTTP servers. See docs/sglang.md.

This package and `cpu_platform` import next to nothing: SGLang loads the latter as a plug-in.
"""
