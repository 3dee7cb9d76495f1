"""``hydra-parallelism doctor``: what is here, who would win, whether processes can talk, and what is wrong in one line each."""
