"""`python -m accel_parallel.train.generate_text`: a quick look at what a run, or an exported folder, continues.

The tensors of the checkpoint become a `LlamaForCausalLM` of transformers, in memory, whose `generate` keeps keys and
values of what it has read (a KV cache).
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_parallel.errors import DataError, RunError
from accel_parallel.init_from import CONFIG
from accel_parallel.llama import llama_config, llama_name
from accel_parallel.output import Output, failing
from accel_parallel.train.agent import die_with_parent
from accel_parallel.train.saved import SavedModel, open_saved
from accel_parallel.verbs import parser
from accel_parallel.verbs.generate import add_arguments


@dataclass(frozen=True)
class Loaded:
    """A model and tokenizer of transformers. Ids from `known` on are rows of the embedding that no token has."""

    model: Any
    tokenizer: Any
    known: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print prompt and continuation on stdout. Ends the process with its exit code."""
    arguments = parser("generate_text", add_arguments).parse_args(argv)
    die_with_parent(signal.SIGTERM)
    with failing("generate", arguments.json) as output:
        work(arguments, output)
    return 0


def work(arguments: argparse.Namespace, output: Output) -> None:
    exported = (arguments.run / CONFIG).is_file() and not (arguments.run / "spec.yaml").exists()
    if exported and arguments.step is not None:
        raise RunError(f"{arguments.run} is an exported folder and has no steps", hint="leave --step out")
    saved = None if exported else open_saved(arguments.run, arguments.step, output.say)
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    loaded = from_folder(arguments.run) if saved is None else from_checkpoint(saved)
    try:
        ids = complete(loaded, arguments, output)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return
    if not arguments.json:
        return  # it has been printed while it was made
    text = loaded.tokenizer.decode(ids, skip_special_tokens=True)
    output.finish({"run": str(arguments.run), "prompt": arguments.prompt, "text": text, "tokens": ids}, [], [], 0)


def complete(loaded: Loaded, arguments: argparse.Namespace, output: Output) -> list[int]:
    """The ids that continue the prompt; their text is printed as it comes, unless JSON is asked for.

    Raises DataError if the prompt leaves no room.
    """
    import torch
    from transformers import TextStreamer

    model, tokenizer = loaded.model, loaded.tokenizer
    prompt = tokenizer(arguments.prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]  # (1, T)
    length, seq_len = prompt.shape[1], model.config.max_position_embeddings
    if length >= seq_len:
        message = f"--prompt has {length} tokens, the model was trained on sequences of {seq_len}"
        raise DataError(message, hint=f"at most {seq_len - 1} leave room for one more")
    tokens = min(arguments.max_new_tokens, seq_len - length)
    if tokens < arguments.max_new_tokens:
        output.say(f"at most {tokens} new tokens: the model was trained on sequences of {seq_len}")
    sampled = arguments.temperature is not None or arguments.top_k is not None
    drawn = {"temperature": arguments.temperature or 1.0, "top_k": arguments.top_k or 0} if sampled else {}
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    torch.manual_seed(arguments.seed)
    made = model.to(device).generate(
        prompt.to(device),
        attention_mask=torch.ones_like(prompt, device=device),
        max_new_tokens=tokens,
        do_sample=sampled,
        suppress_tokens=list(range(loaded.known, model.config.vocab_size)) or None,
        pad_token_id=tokenizer.eos_token_id,
        streamer=None if arguments.json else TextStreamer(tokenizer, skip_special_tokens=True),
        **drawn,
    )
    return [int(token) for token in made[0, length:]]


def from_checkpoint(saved: SavedModel) -> Loaded:
    """Without writing files. Raises RunError for a checkpoint or a tokenizer that cannot be read."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokens, read = saved.tokens(), saved.reader()
    config = LlamaConfig(**llama_config(saved.model, tokens.end_of_text, "float32"))
    weights = {llama_name(name): read(name) for name in saved.sizes()}
    model = LlamaForCausalLM.from_pretrained(None, config=config, state_dict=weights, trust_remote_code=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(tokens.tokenizer_folder, trust_remote_code=False)
    return Loaded(model, tokenizer, tokens.vocab_size)


def from_folder(folder: Path) -> Loaded:
    """What `export` wrote. Raises RunError if transformers cannot read it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, trust_remote_code=False
        ).eval()
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RunError(f"{folder} is no model that can be loaded: {reason}", hint="export the run again") from error
    return Loaded(model, tokenizer, max(tokenizer.get_vocab().values()) + 1)


if __name__ == "__main__":
    sys.exit(main())
