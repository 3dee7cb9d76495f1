"""Fine-tuning a Transformers model under any layout that ``parallelize`` applies: what ``finetune.py`` runs.

Nothing here knows the layout, and the model's code is Transformers' own. What makes the loss the same under every layout is the
reader: :func:`hydra_parallelism.distributed_sampler` deals the windows of one shuffled order out to the data-parallel ranks in
turn, so the batches of all of them together are the same windows whatever their number.
"""

import logging
import time
from collections.abc import Iterator

import torch
from hydra.utils import to_absolute_path
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import hydra_parallelism
import text
import training

logger = logging.getLogger(__name__)


def finetune(cfg: DictConfig) -> dict[str, float]:
    """Train, and return numbers for sweeps: the mean loss of the last step, and tokens per second, both over all ranks."""
    context = hydra_parallelism.current()
    training.check(cfg)
    windows = Windows(text.load(cfg.data.path and to_absolute_path(cfg.data.path), cfg.train.seq_len), cfg.train.seq_len)
    batches = read(windows, cfg)
    model = hydra_parallelism.parallelize(build(cfg).to(context.device)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.train.lr)
    # Ranks with different samples drop different activations, those that share a sample drop the same.
    torch.manual_seed(hydra_parallelism.seed_for(cfg.train.seed, purpose="dropout"))
    last, steps = float("nan"), cfg.train.steps
    began = time.perf_counter()
    for step in training.progress(steps, context.rank):
        if step == 1:  # the first step pays for allocations and for connections between ranks
            began = time.perf_counter()
        tokens = next(batches).to(context.device)
        optimizer.zero_grad()
        # The same call whether the model is cut into pipeline stages or not. Without a cache: it is for generating.
        inputs = {"input_ids": tokens[:, :-1], "use_cache": False}
        loss = hydra_parallelism.forward_backward(model, inputs, tokens[:, 1:], loss_of)
        norm = hydra_parallelism.clip_grad_norm_(model, cfg.train.clip)
        optimizer.step()
        if (step + 1) % cfg.train.log_every == 0 or step in (0, steps - 1):
            last = hydra_parallelism.average_loss(loss).item()
            if context.rank == 0:
                logger.info("step %d/%d loss %.4f gradient norm %.4f", step + 1, steps, last, norm)
    read_tokens = max(steps - 1, 1) * cfg.train.batch_size * cfg.train.seq_len
    return {"loss": last, "tokens_per_s": read_tokens / (time.perf_counter() - began)}


def build(cfg: DictConfig) -> PreTrainedModel:
    """The model in float32: from a checkpoint's folder, or of the sizes in ``cfg.llm`` with weights drawn from the seed.

    Raises:
        ValueError: The model has fewer tokens than there are bytes.
    """
    if cfg.checkpoint is None:
        torch.manual_seed(cfg.train.seed)
        config = AutoConfig.for_model(**OmegaConf.to_container(cfg.llm, resolve=True))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        folder = to_absolute_path(cfg.checkpoint)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    if model.config.vocab_size < text.VOCAB:
        raise ValueError(
            f"the model knows {model.config.vocab_size} tokens, and the text is made of {text.VOCAB} different bytes"
        )
    return model


class Windows(Dataset[Tensor]):
    """A text as pieces of ``seq_len + 1`` tokens that share no target: the last token of a piece is only ever a target."""

    def __init__(self, content: Tensor, seq_len: int) -> None:
        self.pieces = content.unfold(0, seq_len + 1, seq_len)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Tensor:
        """Token numbers of shape ``(seq_len + 1,)``."""
        return self.pieces[index].long()


def read(windows: Windows, cfg: DictConfig) -> Iterator[Tensor]:
    """Yield this data rank's share of one global batch after the other, epoch after epoch: ``(local batch, seq_len + 1)`` each.

    Raises:
        ValueError: The text has less than one batch, before anything is read.
    """
    if len(windows) < cfg.train.batch_size:
        raise ValueError(f"train.batch_size={cfg.train.batch_size}, but the text has {len(windows)} window(s)")
    # Both drop the incomplete end, so that an epoch has the same batches under every layout.
    sampler = hydra_parallelism.distributed_sampler(windows, seed=cfg.train.seed, drop_last=True)
    loader = DataLoader(windows, batch_size=cfg.train.local_batch_size, sampler=sampler, drop_last=True)

    def epochs() -> Iterator[Tensor]:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    return epochs()


def loss_of(output: CausalLMOutputWithPast, targets: Tensor) -> Tensor:
    """Mean over all tokens."""
    return training.loss_of(output.logits, targets)
