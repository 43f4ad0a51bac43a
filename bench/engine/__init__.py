"""The benchmark of the inference engine: the whole service compared with its peers, in one run, over HTTP."""
