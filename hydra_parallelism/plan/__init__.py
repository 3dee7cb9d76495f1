"""What a layout would be on a machine, before anything starts: who sits where, who talks to whom, and what it costs.

Pure and without torch, so that ``hydra-parallelism plan`` answers at once. ``machine`` describes the nodes, ``composition``
turns overrides into a :class:`~.composition.Case`, ``placement`` and ``traffic`` say what follows from it, ``report`` collects
that as plain data, ``text``, ``drawing`` and ``page`` show it, and ``output`` says where.
"""
