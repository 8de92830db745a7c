"""LLM: the Python API. `LLM("smollm2", "smollm2").generate("Hello")`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_serve.adapter.registry import choose_drafter, embedded_backend
from dflash_serve.answers.engine import Engine, Prompt, RequestOutput, Stream
from dflash_serve.deployment.description import Deployment
from dflash_serve.deployment.layers import load_deployment
from dflash_serve.errors import UserError
from dflash_serve.speculation.params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

# Most tokens of an answer where the params do not set `max_tokens`; None there means as many as fit.
MAX_TOKENS = 256
Messages = Sequence[Mapping[str, str]]


class LLM:
    """A target and its drafter, loaded in this process.

    Args:
        target: hub id, local folder, or the bundled `smollm2`; or a whole Deployment.
        drafter: hub id, local folder, `smollm2`, or `auto`, the best published one (`catalogue`); None = none.
        block_size: B, with the anchor; None = the drafter's own.
        width: slots verified in a step: a number, `auto` (chosen by measured cost), or `off`.
        dtype: `float32`, `bfloat16` or `auto`.
        max_model_len: tokens of prompt and answer together; None = the target's.

    Raises:
        UserError: the arguments do not fit each other, the models or this machine.
    """

    def __init__(
        self,
        target: str | Deployment,
        drafter: str | None = None,
        *,
        block_size: int | None = None,
        width: int | str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        if isinstance(target, Deployment):
            self.deployment = target
        else:
            flags: dict[str, Any] = {
                "target": {"model": target},
                "drafter": {"model": drafter},
                "speculation": {"block_size": block_size, "width": width},
                "hardware": {"dtype": dtype},
                "limits": {"max_model_len": max_model_len, "max_batch_size": max_batch_size},
            }
            self.deployment = load_deployment(flags=flags)
        backend = embedded_backend()
        self.deployment, _ = choose_drafter(self.deployment, backend)
        self.engine: Engine = backend.engine(self.deployment)

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answers prompts; returns them in order.

        Args:
            prompts: text or token ids, one or several.
            params: one for all prompts, or one for each; the default samples at temperature 1, as in vLLM. Without
                `max_tokens` an answer has at most `MAX_TOKENS`.

        Raises:
            UserError: a prompt cannot run, or there are not as many `params` as prompts.
        """
        stream = self.stream(prompts, params)
        for _ in stream:
            pass
        return stream.outputs()

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Stream:
        """Answers prompts like `generate`, with each step's text as it comes; `outputs()` has finished requests.

        Any number of streams can be open at once. Closing or deleting one ends its own requests.
        """
        many = _as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if any(not isinstance(one, SamplingParams) for one in each):
            raise UserError("not all of them are SamplingParams", where="params")
        if len(each) != len(many):
            what = f"{len(each)} for {len(many)} prompts"
            raise UserError(what, where="params", do="give one for all prompts, or one for each")
        return self.engine.stream(many, [_limited(one) for one in each])

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> RequestOutput:
        """Answers one conversation through the target's own chat template."""
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise UserError("a conversation is a list of messages", where="messages", do="use generate for text")
        return self.generate([messages], params)[0]

    def spec_generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 2048,
        stop_token_ids: Sequence[int] | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Tensor:
        """z-lab's Transformers call: token ids [1, prompt] -> [1, prompt + answer]; greedy by default."""
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=max_new_tokens,
            stop_token_ids=tuple(stop_token_ids or ()),
            ignore_eos=True,  # z-lab's loop stops at the given tokens only
        )
        if input_ids.dim() != 2 or len(input_ids) != 1:
            raise UserError(
                f"its shape is {list(input_ids.shape)}", where="input_ids", do="give one prompt: [1, tokens]"
            )
        output = self.generate([input_ids[0].tolist()], params)[0]
        return input_ids.new_tensor([output.prompt_token_ids + output.token_ids])


def _limited(params: SamplingParams) -> SamplingParams:
    if "max_tokens" in params.model_fields_set:
        return params
    return params.model_copy(update={"max_tokens": max(MAX_TOKENS, params.min_tokens)})


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        do = "give text, token ids, messages, or a list of these"
        raise UserError(f"{type(prompts).__name__} is no prompt", where="prompts", do=do)
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, Mapping))):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
