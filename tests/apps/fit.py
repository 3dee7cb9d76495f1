"""A Hydra app that trains by Lightning's Trainer in the processes that we started: one BODY line for each rank."""

import os
import warnings

import _app
import hydra
from omegaconf import DictConfig


@hydra.main(config_path="conf", config_name="fit", **_app.HYDRA)
def main(config: DictConfig) -> None:
    # Lightning advises on workers, loggers and the like.
    warnings.filterwarnings("ignore", module="lightning")
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, TensorDataset

    import hydra_parallelism
    from hydra_parallelism.interop import to_lightning, trainer_arguments

    context = hydra_parallelism.current()

    class Line(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 4)
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if context.world_size > 1:
                fully_shard(self.layer, mesh=context.mesh["fsdp"])

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            total = loss.detach().clone()
            torch.distributed.all_reduce(total, group=context.mesh["dp"].get_group())
            self.losses.append(total.item() / context.dp_world_size)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    torch.manual_seed(1)
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 4))
    model = Line()
    trainer = Trainer(
        strategy=ModelParallelStrategy(**to_lightning(context)),
        **trainer_arguments(context.world),
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    share = 8 // context.dp_world_size
    rows = [n for batch in (0, 8) for n in range(batch + context.dp_rank * share, batch + (context.dp_rank + 1) * share)]
    trainer.fit(model, DataLoader(torch.utils.data.Subset(data, rows), batch_size=share))
    losses = " ".join(f"{loss:.6f}" for loss in model.losses)
    _app.say(f"BODY {os.getppid()} {trainer.global_rank} of {trainer.world_size}: {losses}")


if __name__ == "__main__":
    main()
