"""Sequences shared by the ranks of ``cp``, and exact attention over them: ring, Ulysses, and both (arXiv 2405.07719).

============  ======================================================================
module        what it is for
============  ======================================================================
``layout``    which part of a sequence a rank holds, and which lengths can be cut
``shards``    ``shard_sequence``, ``unshard_sequence``
``kernels``   one block of attention on one device
``ring``      blocks of keys and values that go around
``ulysses``   heads traded for sequence
``attention`` ``attention``: what a model calls; judges its arguments
============  ======================================================================
"""
