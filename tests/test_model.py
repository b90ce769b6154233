"""The model: shapes, initialisation, Llama's architecture, the loss, and activation checkpointing."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from accel_parallel.spec import PRESETS, Model
from accel_parallel.train import model as model_module
from accel_parallel.train.model import Attention, LMHead, TransformerBlock, TransformerLM, rotary_angles, rotate

SMALL: dict[str, Any] = {
    "preset": None, "vocab_size": 97, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 64,
    "ffn_dim": 96, "seq_len": 24, "tie_embeddings": False, "rope_theta": 500_000.0,
}  # fmt: skip


def build(seed: int = 0, **changes: Any) -> TransformerLM:
    model = TransformerLM(Model(**(SMALL | changes)))
    model.init_weights(seed)
    return model


def batch(vocab_size: int = 97, rows: int = 2, length: int = 25) -> tuple[Tensor, Tensor]:
    """Random tokens and labels, a third of the labels ignored."""
    tokens = torch.randint(vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels[:, ::3] = -100
    return tokens[:, :-1], labels


def loss_and_grads(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(*inputs)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


# Parameters


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_those_of_the_shape(preset: str) -> None:
    spec = Model(preset=preset)
    with torch.device("meta"):
        model = TransformerLM(spec)
    assert [(name, p.numel()) for name, p in model.named_parameters()] == list(spec.shape.parameters().items())
    assert sum(p.numel() for p in model.parameters()) == spec.shape.total_parameters
    assert sum(p.numel() for p in model.blocks[0].parameters()) == spec.shape.block_parameters


def test_no_buffers_and_the_named_parts() -> None:
    model = build()
    assert list(model.buffers()) == []
    assert [name for name, _ in model.named_children()] == ["token_emb", "blocks", "norm", "head"]
    assert type(model.blocks) is nn.Sequential
    assert all(type(block) is TransformerBlock for block in model.blocks)
    assert not hasattr(model, "get_output_embeddings") and not hasattr(model, "get_input_embeddings")


def test_tied_and_untied() -> None:
    tied, untied = build(tie_embeddings=True), build(tie_embeddings=False)
    assert tied.head.weight is tied.token_emb.weight
    assert untied.head.weight is not untied.token_emb.weight
    tied.head.weight = nn.Parameter(torch.zeros(97, 64))
    tied.tie_weights()
    assert tied.head.weight is tied.token_emb.weight
    untied.tie_weights()
    assert untied.head.weight is not untied.token_emb.weight


def test_initialisation_statistics() -> None:
    model = TransformerLM(Model(preset="tiny", tie_embeddings=False))
    model.init_weights(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones(320)), name
            continue
        expected = 0.02 / 8**0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02  # 4 layers
        assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
        assert abs(parameter.mean().item()) < 0.03 * expected, name


def test_initialisation_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(seed=7).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    again, other = build(seed=7).state_dict(), build(seed=8).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["token_emb.weight"], other["token_emb.weight"])
    assert not torch.equal(first["blocks.0.attn.q_proj.weight"], first["blocks.1.attn.q_proj.weight"])


@pytest.mark.parametrize("tied", [True, False])
def test_meta_then_materialise_then_initialise(tied: bool) -> None:
    with torch.device("meta"):
        model = TransformerLM(Model(**(SMALL | {"tie_embeddings": tied})))
    model.to_empty(device="cpu").init_weights(0)
    expected = build(tie_embeddings=tied)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in expected.named_parameters()]
    assert torch.equal(model(batch()[0]), expected(batch()[0]))


# Architecture


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model, (tokens, _) = build(), batch()
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 97
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 25, 97)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator).expand(2, 1, 1, 64, 16)  # one vector at 64 positions
    cos, sin = rotary_angles(64, 16, 10_000.0, torch.device("cpu"))
    scores = (rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2))[0, 0]  # (T, T)
    for distance in (0, 1, 7, 40):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)
    assert scores[1, 0].item() != pytest.approx(scores[7, 0].item(), abs=1e-2)
    torch.testing.assert_close(rotate(q, cos, sin).norm(dim=-1), q.norm(dim=-1))


def test_rotary_angles_stay_float32() -> None:
    # bfloat16 would give positions 1000 and 1001 of the fastest channel the same angle.
    cos, _ = rotary_angles(1002, 16, 10_000.0, torch.device("cpu"))
    assert cos.dtype == torch.float32
    assert cos[1001, 0].item() == pytest.approx(torch.tensor(1001.0).cos().item(), abs=1e-6)
    x = torch.randn(1, 1, 1002, 16, dtype=torch.bfloat16)
    assert rotate(x, *rotary_angles(1002, 16, 10_000.0, x.device)).dtype == torch.bfloat16


def test_grouped_queries_equal_repeated_key_value_heads() -> None:
    grouped = build().blocks[0].attn
    assert isinstance(grouped, Attention)
    full = Attention(Model(**(SMALL | {"num_kv_heads": 4})))
    weights = grouped.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        weights[name] = weights[name].unflatten(0, (2, 16)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    x = torch.randn(2, 24, 64)
    torch.testing.assert_close(grouped(x), full(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_hugging_face_llama(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = build(tie_embeddings=tied, norm_eps=1e-3)
    with torch.no_grad():
        for parameter in model.parameters():  # larger weights and uneven norms, so that every part shows
            parameter.mul_(4.0 if parameter.dim() == 2 else torch.rand(64) + 0.5)
    renames = {
        r"^token_emb\.": "model.embed_tokens.",
        r"^blocks\.": "model.layers.",
        r"^norm\.": "model.norm.",
        r"^head\.": "lm_head.",
        r"\.attn_norm\.": ".input_layernorm.",
        r"\.ffn_norm\.": ".post_attention_layernorm.",
        r"\.attn\.": ".self_attn.",
        r"\.ffn\.": ".mlp.",
    }
    weights = {}
    for name, weight in model.state_dict().items():
        for ours, theirs in renames.items():
            name = re.sub(ours, theirs, name)
        weights[name] = weight
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=97, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64,
            intermediate_size=96, max_position_embeddings=24, rope_theta=500_000.0, rms_norm_eps=1e-3,
            tie_word_embeddings=tied,
        )
    )  # fmt: skip
    llama.load_state_dict(weights, strict=True)
    tokens, _ = batch()
    with torch.no_grad():
        ours, theirs = model(tokens), llama(tokens).logits
    assert ours.std() > 0.3
    assert (ours - theirs).abs().max() < 1e-5


# Loss


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "LOSS_CHUNK_TOKENS", 16)  # 50 tokens: three chunks and a rest


def test_full_loss_is_the_mean_over_labels_that_count() -> None:
    model, (tokens, labels) = build(loss="full"), batch()
    log_p = model(tokens).log_softmax(-1)
    keep = labels != -100
    expected = -log_p[keep].gather(1, labels[keep].unsqueeze(1)).mean()
    torch.testing.assert_close(model(tokens, labels), expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.usefixtures("small_chunks")
def test_chunked_equals_full(tied: bool) -> None:
    inputs = batch()
    full_loss, full = loss_and_grads(build(loss="full", tie_embeddings=tied), *inputs)
    loss, grads = loss_and_grads(build(loss="chunked", tie_embeddings=tied), *inputs)
    assert loss.item() == pytest.approx(full_loss.item(), rel=1e-6)
    assert grads.keys() == full.keys() and len(grads) == (20 if tied else 21)
    for name, grad in grads.items():
        assert relative_error(grad, full[name]) < 2e-6, name


@pytest.mark.usefixtures("small_chunks")
def test_chunked_gradients_scale_with_the_loss() -> None:
    model, inputs = build(), batch()
    _, once = loss_and_grads(model, *inputs)
    model.zero_grad()
    (model(*inputs) * 0.25).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert relative_error(parameter.grad, once[name] * 0.25) < 1e-6, name


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_nothing_to_predict_is_nan_and_a_label_out_of_range_is_refused(loss: str) -> None:
    model, (tokens, labels) = build(loss=loss), batch()
    assert model(tokens, torch.full_like(labels, -100)).isnan()
    for wrong in (97, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            model(tokens, labels.where(labels != -100, wrong))


@pytest.mark.usefixtures("small_chunks")
def test_chunked_without_gradients() -> None:
    model, inputs = build(), batch()
    with torch.no_grad():
        loss = model(*inputs)
    assert not loss.requires_grad
    assert torch.equal(loss, model(*inputs).detach())


@pytest.mark.usefixtures("small_chunks")
def test_chunked_in_bfloat16_keeps_the_loss_and_weight_gradient_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    head = LMHead(Model(**(SMALL | {"vocab_size": 512})))
    nn.init.normal_(head.weight, std=0.1, generator=generator)
    head.bfloat16()
    hidden = torch.randn(8, 100, 64, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(512, (8, 100), generator=generator)
    loss, grads = loss_and_grads(head, hidden, labels)
    exact_hidden = hidden.detach().float().requires_grad_()
    exact_weight = head.weight.detach().float().requires_grad_()
    exact = F.cross_entropy(F.linear(exact_hidden, exact_weight).flatten(0, 1), labels.flatten())
    exact.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=2e-5)
    assert hidden.grad is not None and exact_hidden.grad is not None and exact_weight.grad is not None
    assert hidden.grad.dtype == grads["weight"].dtype == torch.bfloat16
    assert relative_error(hidden.grad, exact_hidden.grad) < 5e-3
    assert relative_error(grads["weight"], exact_weight.grad) < 5e-3  # 50 chunks summed in bfloat16: 1e-2


class Allocations(TorchDispatchMode):
    """Every storage that an operation returned, while it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.largest = max(self.largest, storage.nbytes())
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live_bytes())
        return out

    def live_bytes(self, *besides: Tensor) -> int:
        """Bytes alive, views of the tensors `besides` not counted."""
        known = {tensor.untyped_storage()._cdata for tensor in besides}
        alive = {key: size for key, (storage, size) in self.storages.items() if not storage.expired()}
        return sum(size for key, size in alive.items() if key not in known)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("loss", "tokens_at_once"), [("full", 256), ("chunked", 16)])
def test_largest_tensor_of_the_loss(loss: str, tokens_at_once: int) -> None:
    head = LMHead(
        Model(**(SMALL | {"vocab_size": 4096, "hidden_dim": 8, "num_heads": 1, "num_kv_heads": 1, "loss": loss}))
    )
    nn.init.normal_(head.weight, std=0.02)
    hidden, labels = torch.randn(4, 64, 8, requires_grad=True), torch.randint(4096, (4, 64))
    with Allocations() as seen:
        head(hidden, labels).backward()
    logits = tokens_at_once * 4096 * 4
    assert seen.largest == logits
    if loss == "chunked":  # logits and log-probabilities of one chunk, none of the chunk before
        assert seen.peak < 2 * logits + 3 * 4096 * 8 * 4


class Products(TorchDispatchMode):
    """The type of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("with_grad", [True, False])
def test_chunked_computes_each_product_once_in_the_type_of_autocast(with_grad: bool) -> None:
    head = build().head
    hidden, labels = torch.randn(2, 25, 64), batch()[1]
    with torch.set_grad_enabled(with_grad), torch.autocast("cpu", torch.bfloat16), Products() as products:
        head(hidden, labels)
    assert products.dtypes == [torch.bfloat16] * (4 * (3 if with_grad else 1))  # 4 chunks


# Precision


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_bfloat16_autocast(loss: str) -> None:
    model, inputs = build(loss=loss), batch()
    exact_loss, exact = loss_and_grads(model, *inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(inputs[0]).dtype == torch.bfloat16
        got_loss, grads = loss_and_grads(model, *inputs)
    assert got_loss.dtype == torch.float32
    assert got_loss.item() != exact_loss.item()
    assert got_loss.item() == pytest.approx(exact_loss.item(), rel=1e-3)
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert relative_error(grad, exact[name]) < 3e-2, name


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_bfloat16_parameters(loss: str) -> None:
    exact_loss, _ = loss_and_grads(build(loss=loss), *batch())
    got_loss, grads = loss_and_grads(build(loss=loss).bfloat16(), *batch())
    assert got_loss.dtype == torch.float32
    assert got_loss.item() == pytest.approx(exact_loss.item(), rel=1e-3)
    assert all(grad.dtype == torch.bfloat16 and grad.isfinite().all() for grad in grads.values())


# Activation checkpointing


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["block", "selective"])
def test_checkpointing_changes_no_bit(mode: str, autocast: bool) -> None:
    plain, recomputed = build(), build(activation_checkpointing=mode)
    assert plain.state_dict().keys() == recomputed.state_dict().keys()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected_loss, expected = loss_and_grads(plain, *batch())
        loss, grads = loss_and_grads(recomputed, *batch())
    assert torch.equal(loss, expected_loss)
    assert grads.keys() == expected.keys()
    assert all(torch.equal(grads[name], expected[name]) for name in grads)


def activation_bytes(mode: str) -> int:
    """Bytes that the forward pass of the blocks leaves alive for the backward pass."""
    model = build(activation_checkpointing=mode)
    x = torch.randn(2, 24, 64, requires_grad=True)
    with Allocations() as seen:
        out = model.blocks(x)
        return seen.live_bytes(x, out, *model.parameters())


def test_checkpointing_keeps_less() -> None:
    none, selective, block = (activation_bytes(mode) for mode in ("none", "selective", "block"))
    assert block == 2 * 24 * 64 * 4  # only what the first block hands to the second
    assert 2 * block < selective < 0.7 * none


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_checkpointing_is_for_training_only(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("recomputation was set up")

    monkeypatch.setattr(model_module, "checkpoint", refuse)
    model, inputs = build(activation_checkpointing=mode), batch()
    with torch.no_grad():
        model(*inputs)
    model.eval()(*inputs)
    with pytest.raises(AssertionError, match="recomputation"):
        model.train()(*inputs)


# Under wrappers


@pytest.fixture
def process_group() -> Iterator[None]:
    if dist.is_initialized():
        pytest.skip("a process group exists already")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["none", "block", "selective"])
@pytest.mark.usefixtures("process_group", "small_chunks")
def test_every_part_a_unit_of_its_own_in_bfloat16(mode: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plain, model = build(), build(activation_checkpointing=mode)
    expected_loss, expected = loss_and_grads(plain.bfloat16(), *batch())
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*model.blocks, model.head, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    loss = model(*batch())
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == expected_loss.item()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad.to_local(), expected[name]) < 1e-2, name  # type: ignore[union-attr]


def test_the_model_names_no_strategy() -> None:
    text = Path(model_module.__file__).read_text(encoding="utf-8")
    assert re.findall(r"fsdp|ddp|shard|accelerator|distributed|world_size|\brank\b", text, re.IGNORECASE) == []
