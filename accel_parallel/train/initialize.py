"""The first weights of a run: drawn, or those of a Hugging Face Llama checkpoint."""

from pathlib import Path

import torch
from torch import nn

from accel_parallel.errors import AccelParallelError, DataError
from accel_parallel.init_from import check_init_from, folder_of, weight_files
from accel_parallel.llama import llama_name, our_name
from accel_parallel.spec import Model
from accel_parallel.train.data import TokenData
from accel_parallel.train.model import TransformerLM
from accel_parallel.train.runtime import Runtime


def initialize(model: TransformerLM, runtime: Runtime, *, restored_later: bool) -> None:
    """Collective. Fill the weights on the processes that have to hold them, each reading them for itself.

    `model.init_from` is not looked at when a checkpoint is going to be restored. Raises what `read_llama` and
    `check_init_from` raise, on every process.
    """
    spec, error = runtime.spec, None
    try:
        if not runtime.fills_weights():
            pass
        elif spec.model.init_from is None or restored_later:
            model.init_weights(spec.training.seed)
        else:
            check_init_from(spec.model)
            read_llama(model, folder_of(spec.model))
    except AccelParallelError as raised:
        error = raised
    for first in filter(None, runtime.gather_objects(error)):
        raise first


@torch.no_grad()
def read_llama(model: TransformerLM, folder: Path) -> None:
    """Fill every parameter from the folder's safetensors, one tensor at a time. Raises DataError if one is not there,
    damaged, of another shape, or one that `TransformerLM` does not have.
    """
    from safetensors import SafetensorError, safe_open

    model.tie_weights()
    missing = dict(model.named_parameters())
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    ours = our_name(name)
                    # Older files hold what follows from rope_theta, and some of tied models the head once more.
                    if name.endswith(".rotary_emb.inv_freq") or (model.tie_embeddings and ours == "head.weight"):
                        continue
                    if ours is None or ours not in missing:
                        raise DataError(f"{file} holds {name[:100]}, which this model does not have")
                    _fill(missing.pop(ours), tensors.get_tensor(name), f"{file}: {name}")
        except (SafetensorError, OSError) as error:
            raise DataError(f"{file} cannot be read: {str(error)[:200]}") from None
    if missing:
        raise DataError(f"{folder} holds no {llama_name(next(iter(missing)))}", hint="it is not complete")


def other_tokenizer(model: Model, data: TokenData, tokenizer: str) -> str | None:
    """A warning if the weights were trained on the ids of another tokenizer; `tokenizer` is `data.tokenizer`."""
    folder = folder_of(model)
    if Path(tokenizer).expanduser().resolve() == folder.resolve():
        return None
    theirs, ours = folder / "tokenizer.json", data.tokenizer_folder / "tokenizer.json"
    if theirs.is_file() and ours.is_file() and theirs.read_bytes() == ours.read_bytes():
        return None
    return (
        f"warning: data.tokenizer {tokenizer} is not the one of model.init_from {folder}: token ids would mean "
        f"something else (--set data.tokenizer={folder})"
    )


def _fill(parameter: nn.Parameter, tensor: torch.Tensor, name: str) -> None:
    if tensor.shape != parameter.shape or not tensor.is_floating_point():
        found, wanted = f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}", tuple(parameter.shape)
        raise DataError(f"{name} is {found}, which does not fill a parameter of {wanted}")
    parameter.copy_(tensor)
