"""The benchmark of the inference engine: the whole service beside its peers, in one run, over HTTP."""
