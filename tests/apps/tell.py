"""A task that computes nothing and returns what the config says, for sweeps of many jobs."""

import _app
import hydra
from omegaconf import DictConfig, OmegaConf


@hydra.main(config_path="conf", config_name="tell", **_app.HYDRA)
def main(config: DictConfig) -> object:
    if config.fail:
        raise ValueError(config.fail)
    return OmegaConf.to_container(config.value) if OmegaConf.is_config(config.value) else config.value


if __name__ == "__main__":
    main()
