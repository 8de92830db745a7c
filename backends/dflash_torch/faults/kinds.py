"""Faults of serving a drafter: mistakes that engines, converters and checkpoints are known to make, made on purpose.

Upstream cases are named where they are known; the rest are the conventions in which readers of DFlash differ (layer ids
counted from 0 or 1, causal sliding windows, mask tokens that fall back, embedding scales). A fault changes a
Speculator: its feature rows, its settings or its weights; the sound one is left alone, and shares its weights. Run
through the real loop or replayed (`replay`), faults are the controls of an acceptance figure (`evaluate`: a figure that
survives them is no proof) and the explanations of a low one (`doctor`). A row of features that never arrives is a row
of zeros: without biases its keys and values are zero, as in memory that was never written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from dflash_serve.answers.engine import Prompt
from dflash_serve.checkpoint.config import DrafterConfig, RopeConfig, Slots, uniform_target_layer_ids
from dflash_serve.doctor.evidence import Fault
from dflash_serve.models.attention import Attend
from dflash_serve.models.drafter import Drafter, HotHead
from dflash_serve.models.layers import RotaryEmbedding, dense_weight

from ..request import Request
from ..speculator import Speculator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THETAS = (1e4, 1e5, 1e6)  # transformers' default and what published targets use
FP8 = torch.float8_e4m3fn
Module = TypeVar("Module", bound=nn.Module)
Change = Callable[[Speculator], Speculator]
Disturbance = Callable[[Tensor, Request], Tensor]
"""New feature rows [rows, F*H] of a request, from position `injected` on -> the rows that are injected instead."""


@dataclass(frozen=True)
class DrafterFault(Fault):
    """A fault in how the drafter is served: drafts change, and the target's answers do not."""

    change: Change = field(kw_only=True)


@dataclass(frozen=True)
class PromptFault(Fault):
    """A fault of the target's prompts: its answers differ, so it needs a run of its own."""

    prompts: tuple[tuple[int, ...], ...] = ()  # token ids of each prompt under the fault


def drafter_faults(speculator: Speculator) -> list[DrafterFault]:
    """Every fault that applies to this pair, except those of the prompt; names are unique."""
    return [*settings(speculator), *_block(speculator), *_context(), *_weights(speculator), *_heads(speculator)]


def settings(speculator: Speculator) -> Iterator[DrafterFault]:
    """Faults that a line of the checkpoint's configuration would cause as well."""
    config, depth = speculator.drafter.config, speculator.target.config.num_layers
    listed = config.target_layer_ids
    for by, who in ((1, "ids were raised twice"), (-1, "an id counted from 1 (speculators, GGUF) is read as from 0")):
        ids = tuple(min(max(layer + by, 0), depth - 1) for layer in listed)
        says = f"features of target layers {list(ids)}: {who}"
        yield _other_layers("layer ids", f"layer ids {by:+d}", says, ids)
    if len(listed) > 1:
        says = "the layers are concatenated in another order than fc takes them"
        yield _other_layers("layer order", "target layers in reverse order", says, listed[::-1])
    if depth >= 4 and (ids := uniform_target_layer_ids(depth, len(listed))) != listed:
        says = "the list in the checkpoint is not read; the formula's takes its place"
        yield _other_layers("layer ids", "layer ids by formula", says, ids)
    target = speculator.target.config
    yield from mask_tokens(config, (0, *target.eos_token_ids[:1], target.vocab_size - 1))
    yield from _attention(config, speculator.block_size)
    yield from _rope(config, target.rope)
    yield _slots(config)
    scale = 1.0 if config.embedding_scale != 1.0 else config.hidden_size**0.5
    says = "the block's embeddings are multiplied as Gemma's are, or no longer are"
    setting = f"input_embedding_scale = {scale:g}"
    yield _other("embedding scale", f"embedding scale {scale:g}", says, setting, embedding_scale=scale)


def _other(cause: str, name: str, says: str, setting: str, **fields: object) -> DrafterFault:
    return DrafterFault(cause, name, says, setting, change=configured(**fields))


def _other_layers(cause: str, name: str, says: str, ids: tuple[int, ...]) -> DrafterFault:
    return _other(cause, name, says, f"target_layer_ids = {list(ids)}", target_layer_ids=ids)


def mask_tokens(config: DrafterConfig, tokens: Iterable[int]) -> Iterator[DrafterFault]:
    """Other mask tokens than the configured one: readers fall back to padding, end of text, the first or last token."""
    if config.mask_token_id is None:
        return
    for token in dict.fromkeys(tokens):
        if token != config.mask_token_id and 0 <= token < config.vocab_size:
            says = "masked slots are filled with another token: a fallback, or padding"
            yield _other("mask token", f"mask token {token}", says, f"mask_token_id = {token}", mask_token_id=token)


def _slots(config: DrafterConfig) -> DrafterFault:
    # The same weights read in the other convention accept less than 1 % and raise no error (vLLM #56792).
    other: Slots = "anchor-first" if config.slots == "fill-in" else "fill-in"
    says = "row j is read as the token at its position, or after it: a missing key means either, by the reader"
    setting = f"sample_from_anchor = {str(other == 'anchor-first').lower()}"
    return _other("slot convention", f"slots read as {other}", says, setting, slots=other)


def _attention(config: DrafterConfig, block_size: int) -> Iterator[DrafterFault]:
    causal = all(kind.causal for kind in config.layers)
    layers = tuple(kind.model_copy(update={"causal": not causal}) for kind in config.layers)
    name, says = ("bidirectional", "is_causal was lost") if causal else ("causal", "the default of most attention code")
    setting = f"is_causal = {str(not causal).lower()}"
    yield _other("block attention", f"{name} block attention", says, setting, layers=layers)
    windowed = any(kind.window for kind in config.layers)
    window = None if windowed else 4 * block_size
    layers = tuple(kind.model_copy(update={"window": window}) for kind in config.layers)
    name = "window ignored" if windowed else f"window of {window} tokens"
    says = "layer_types say full while use_swa is set (ModelOpt), or a draft window was given to the engine"
    yield _other("window", name, says, f"sliding_window = {window or 'null'}", layers=layers)


def _rope(config: DrafterConfig, target: RopeConfig) -> Iterator[DrafterFault]:
    rope, says = config.rope, "rope_theta was not read, or is another model's"
    for theta in dict.fromkeys((*THETAS, target.theta)):
        if theta != rope.theta:
            changed = rope.model_copy(update={"theta": theta})
            yield _other("RoPE theta", f"RoPE theta {theta:g}", says, f"rope_theta = {theta:g}", rope=changed)
    if rope.scaling:
        other = RopeConfig(theta=rope.theta)
    elif target.scaling:
        other = target.model_copy(update={"theta": rope.theta})
    else:
        other = RopeConfig(theta=rope.theta, scaling="linear", factor=4.0)
    name = "RoPE scaling ignored" if rope.scaling else f"RoPE scaled ({other.scaling}, {other.factor:g}x)"
    says = "rope_scaling was not read, or the target's is applied to a drafter that was trained without"
    yield _other("RoPE scaling", name, says, f"rope_scaling = {other.scaling or 'null'}", rope=other)


def _block(speculator: Speculator) -> Iterator[DrafterFault]:
    size = speculator.drafter.config.rows(speculator.block_size)
    change = block_input(lambda rows, at: (torch.cat([rows[:, 1:2], rows[:, 1:]], dim=1), at), size)
    says = "slot 0 holds the mask's embedding, not the anchor's (hipfire #483: 1.46 instead of 6.34)"
    yield DrafterFault("anchor", "anchor embedding missing in slot 0", says, change=change)
    for by, name in ((1, "late"), (-1, "early")):
        change = block_input(lambda rows, at, by=by: (rows, (at + by).clamp(min=0)), size)  # type: ignore[misc]
        says = "the block's positions do not follow on the context's"
        yield DrafterFault("positions", f"block positions one {name}", says, change=change)


def _context() -> Iterator[DrafterFault]:
    yield _rows("features", "features shuffled", "rows land at the wrong positions", Shuffled)
    nothing = only(lambda at, request: at < 0)
    yield _rows("features", "features zeroed", "no feature reaches the drafter", lambda: nothing)
    says = "features are shifted by one token, as EAGLE's drafters want them"
    yield _rows("feature rows", "features one position late", says, DelayedByOne)
    says = "a prefix hit or a prefill server left the drafter without the prompt (TensorRT-LLM #16005, #19352)"
    for share, name in ((1.0, "no drafter context of the prompt"), (0.5, "no drafter context of half of the prompt")):
        later = only(lambda at, request, share=share: at >= round(share * request.prompt_length))  # type: ignore[misc]
        yield _rows("prompt context", name, says, lambda later=later: later)  # type: ignore[misc]
    says = "features of accepted tokens are not injected: only each step's anchor's are"
    anchors = only(lambda at, request: (at < request.prompt_length) | (at == request.injected))
    yield _rows("stale context", "accepted tokens not injected", says, lambda: anchors)
    prompt = only(lambda at, request: at < request.prompt_length)
    says = "nothing is injected after the prefill"
    yield _rows("stale context", "no drafter context of the answer", says, lambda: prompt)


def _rows(cause: str, name: str, says: str, make: Callable[[], Disturbance]) -> DrafterFault:
    # `make` is called for every run, since a disturbance may remember requests.
    return DrafterFault(cause, name, says, change=lambda speculator: DisturbedSpeculator(speculator, make()))


def _weights(speculator: Speculator) -> Iterator[DrafterFault]:
    last = speculator.drafter.config.num_layers - 1
    for index in sorted({0, last // 2, last}):
        says = "its tensors have other names and are skipped without an error"
        change = drafter_changed(partial(skip_layer, index=index))
        yield DrafterFault(f"layer {index}", f"weights of drafter layer {index} missing", says, change=change)
    says = "fc was skipped without an error and is random (SGLang #39087: fc.weight_packed)"
    yield DrafterFault("fc", "fc not loaded", says, change=drafter_changed(random_fc))
    says = "the context goes to the layers without hidden_norm"
    yield DrafterFault("hidden_norm", "hidden_norm missing", says, change=replaced(hidden_norm=nn.Identity()))
    says = "the head gets the last layer's output without norm"
    yield DrafterFault("norm", "final norm missing", says, change=replaced(norm=nn.Identity()))
    other = torch.bfloat16 if speculator.target.embedding.dtype == torch.float32 else torch.float32
    name = f"drafter in {str(other).removeprefix('torch.')}"
    change = drafter_changed(partial(in_dtype, dtype=other))
    yield DrafterFault("dtype", name, "another precision than the reference's", change=change, benign=True)
    says = "the drafter's linear layers are rounded to FP8"
    yield DrafterFault("quantised drafter", "drafter in FP8", says, change=drafter_changed(in_fp8), benign=True)
    says = "the head that drafts are chosen by is rounded"
    yield DrafterFault("quantised head", "head in FP8", says, change=fp8_head, benign=True)


def _heads(speculator: Speculator) -> Iterator[DrafterFault]:
    # heads that loaders skip or misread
    config = speculator.drafter.config
    if config.draft_vocabulary is not None:
        says = "the engine puts the target's head in its place (vllm-ascend #11374: acceptance 25 % -> 1.7 %)"
        yield DrafterFault("draft head", "lm_head replaced by the target's", says, change=target_head)
        says, change = "d2t's offsets are read as the ids themselves", replaced(token_ids=speculator.drafter.d2t)
        yield DrafterFault("vocabulary map", "d2t as absolute ids", says, change=change)
    if config.convolution is not None:
        says, change = "its tensors are skipped, the layers run without", drafter_changed(without_convolution)
        yield DrafterFault("convolution", "convolution dropped", says, change=change)
    if config.selector is not None:
        says = "the codebooks' names have no .weight, and are skipped by loaders that want one"
        change = drafter_changed(empty_codebooks)
        yield DrafterFault("selector", "codebooks left zero", says, change=change)
    if config.markov is not None:
        says, change = "the Markov head's tensors are skipped", replaced(markov_head=None)
        yield DrafterFault("Markov head", "Markov head not loaded", says, change=change)


def prompt_faults(
    tokenizer: PreTrainedTokenizerBase, asked: Sequence[Prompt], token_ids: Sequence[Sequence[int]]
) -> Iterator[PromptFault]:
    """Faults of the chat template and of the token that begins a text (BOS).

    Args:
        asked: text, token ids or messages.
        token_ids: the correct token ids of these prompts.
    """
    texts = [_without_template(prompt) for prompt in asked]
    if tokenizer.chat_template and all(text is not None for text in texts):
        bare = tuple(tuple(tokenizer(text)["input_ids"]) for text in texts)
        says = "prompts reach the target without the chat template that the drafter was trained behind"
        yield PromptFault("chat template", "chat template missing", says, prompts=bare)
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    has = all(ids[0] == bos for ids in token_ids)
    more = tuple((bos, *ids) for ids in token_ids)
    name = "BOS doubled" if has else "BOS added"
    yield PromptFault("BOS", name, "template and tokenizer both add it", prompts=more)
    if has:
        fewer = tuple(tuple(ids[1:]) for ids in token_ids)
        yield PromptFault("BOS", "BOS missing", "neither template nor tokenizer adds it", prompts=fewer)


def _without_template(prompt: Prompt) -> str | None:
    # None for a prompt that is not messages
    turns = [turn for turn in prompt if isinstance(turn, Mapping)]
    return "\n".join(turn["content"] for turn in turns) if turns else None


class DisturbedSpeculator(Speculator):
    """A sound speculator's drafter and K/V cache, with other feature rows injected.

    Args:
        disturb: applied to the new rows of each request before they reach the drafter.
    """

    on_device = False

    def __init__(self, sound: Speculator, disturb: Disturbance) -> None:
        super().__init__(sound.drafter, sound.target, block_size=sound.block_size, max_batch_size=1, capacity=1)
        self.cache, self.drafter_runner = sound.cache, sound.drafter_runner
        self.disturb = disturb

    def inject(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.features:
                request.features = [self.disturb(torch.cat(request.features), request)]
        super().inject(requests)


def drafter_changed(change: Callable[[Drafter], None]) -> Change:
    """A change of a twin of the drafter."""

    def apply(speculator: Speculator) -> Speculator:
        made = copy.copy(speculator)
        made.drafter = twin(speculator.drafter)
        change(made.drafter)
        return made

    return apply


def configured(**fields: object) -> Change:
    """A change of fields of DrafterConfig; the weights stay."""

    def change(drafter: Drafter) -> None:
        device = drafter.rotary.inverse_frequency.device
        drafter.config = config = drafter.config.model_copy(update=fields)
        drafter.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings).to(device)

    return drafter_changed(change)


def block_input(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], block_size: int) -> Change:
    """A change of the block's inputs: rows [blocks, B, H] and positions [rows]."""

    def before(_: nn.Module, args: tuple[Tensor, Tensor, object]) -> tuple[Tensor, Tensor, object]:
        noise, positions, attend = args
        rows, positions = change(noise.view(-1, block_size, noise.shape[-1]), positions)
        return rows.reshape(noise.shape), positions, attend

    def hook(drafter: Drafter) -> None:
        drafter.register_forward_pre_hook(before)

    return drafter_changed(hook)


def twin(module: Module) -> Module:
    """A copy that can be changed without changing the original; the tensors themselves are shared."""
    packed = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    return copy.deepcopy(module, {id(each): each for each in (*module.parameters(), *module.buffers(), *packed)})


def only(arrives: Callable[[Tensor, Request], Tensor]) -> Disturbance:
    """Some rows never arrive: those whose positions [rows] are not True in `arrives(positions, request)`."""

    def disturb(rows: Tensor, request: Request) -> Tensor:
        positions = request.injected + torch.arange(len(rows), device=rows.device)
        return rows * arrives(positions, request)[:, None]

    return disturb


class Shuffled:
    """The right rows at the wrong positions, made anew for every draft: acceptance must collapse."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, rows: Tensor, request: Request) -> Tensor:
        before = [self.kept[request.id]] if request.id in self.kept else []
        self.kept[request.id] = whole = torch.cat([*before, rows])
        request.injected = 0
        return whole[torch.randperm(len(whole), generator=self.generator).to(whole.device)]


class DelayedByOne:
    """Each row lands one position late, as EAGLE's drafters want them: the first is there twice, the newest missing."""

    def __init__(self) -> None:
        self.last: dict[int, Tensor] = {}

    def __call__(self, rows: Tensor, request: Request) -> Tensor:
        before = self.last.get(request.id, rows[:1])
        self.last[request.id] = rows[-1:].clone()
        return torch.cat([before, rows[:-1]])


def replaced(**modules: object) -> Change:
    """Other modules of the drafter in the places of its own; None = none."""

    def change(drafter: Drafter) -> None:
        for name, module in modules.items():
            setattr(drafter, name, module)

    return drafter_changed(change)


def skip_layer(drafter: Drafter, index: int) -> None:
    """A layer whose weights never arrived and are zero adds nothing to what passes through it."""
    drafter.layers[index].register_forward_hook(lambda module, args, out: args[0])


def random_fc(drafter: Drafter) -> None:
    """`fc` as initialised: its tensor was not found under its name."""
    device = drafter.rotary.inverse_frequency.device
    weight = torch.empty(drafter.config.hidden_size, drafter.config.feature_size)
    nn.init.normal_(weight, std=0.02, generator=torch.Generator().manual_seed(20602))
    drafter.fc = linear(weight.to(device, drafter.hidden_norm.weight.dtype))


def in_dtype(drafter: Drafter, dtype: torch.dtype) -> None:
    """All of the drafter's arithmetic in another dtype; what comes and goes, and the cache, keep their own."""
    outer = drafter.hidden_norm.weight.dtype

    def before(_: nn.Module, args: tuple[Tensor, Tensor, Attend]) -> tuple[Tensor, Tensor, Attend]:
        noise, positions, attend = args

        def attending(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(layer, q.to(outer), k.to(outer), v.to(outer)).to(dtype)

        return noise.to(dtype), positions, attending

    drafter.fc.register_forward_pre_hook(lambda module, args: (args[0].to(dtype),))
    drafter.register_forward_pre_hook(before)
    drafter.register_forward_hook(lambda module, args, out: out.to(outer))
    rotary = drafter.rotary
    for module in drafter.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
    drafter.rotary = rotary


def in_fp8(drafter: Drafter) -> None:
    """Every linear layer's weights rounded to FP8, one scale a tensor."""
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(rounded_to_fp8(module.weight), requires_grad=False)


def fp8_head(speculator: Speculator) -> Speculator:
    """The head it drafts with rounded to FP8; the target verifies with its own."""
    made, target = copy.copy(speculator), twin(speculator.target)
    target.head = linear(rounded_to_fp8(dense_weight(target.head)))
    made.target = target
    if made.hot_head is not None:
        made.hot_head = HotHead(target.head, made.hot_head.token_ids, made.drafter.markov_head)
    return made


def target_head(speculator: Speculator) -> Speculator:
    """The first rows of the target's head instead of the drafter's own head."""
    assert speculator.drafter.d2t is not None
    weight = dense_weight(speculator.target.head)[: len(speculator.drafter.d2t)]
    return replaced(lm_head=linear(weight))(speculator)


class NoConvolution(nn.Module):
    """Lets rows pass as they are; stands where a `GroupedConvolution` was."""

    def before(self, x: Tensor, rows: int) -> tuple[Tensor, None]:
        return x, None

    def after(self, y: Tensor, _: None) -> Tensor:
        return y


def without_convolution(drafter: Drafter) -> None:
    """Layers without their convolutions."""
    for layer in drafter.layers:
        for name in ("attention_conv", "mlp_conv"):
            setattr(layer, name, NoConvolution())


def empty_codebooks(drafter: Drafter) -> None:
    """A selector with codebooks of zeros."""
    selector = drafter.candidate_selector
    assert selector is not None
    for name in ("predecessor_codebook", "successor_codebook"):
        parameter = getattr(selector, name)
        setattr(selector, name, nn.Parameter(torch.zeros_like(parameter), requires_grad=False))


def linear(weight: Tensor) -> nn.Linear:
    """A layer of this weight [out, in]."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def rounded_to_fp8(weight: Tensor) -> Tensor:
    """A weight as it comes back from FP8 (e4m3) with one scale."""
    scale = weight.abs().max().float().clamp(min=1e-12) / torch.finfo(FP8).max
    return ((weight.float() / scale).to(FP8).float() * scale).to(weight.dtype)
