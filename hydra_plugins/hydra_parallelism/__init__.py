"""Where Hydra finds this library. Everything it imports is paid for by every Hydra app in the environment."""
