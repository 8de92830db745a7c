"""What a drafter may have besides plain DFlash: a Markov head and a confidence head (DSpark, arXiv 2607.05147), grouped
convolutions and a candidate selector (DFlash2); their sizes, and the names and shapes of their tensors.

None of these = plain DFlash. Tensor names are DeepSpec's for the first two and z-lab's for the others.
"""

from __future__ import annotations

from typing import Literal

from dflash_serve.common.frozen import Frozen, PositiveInt

MASK_EMBEDDING = "mask_embedding"
"""The tensor that fills masked slots where no token of the target does."""
MarkovKind = Literal["vanilla", "gated", "rnn"]
Slots = Literal["fill-in", "anchor-first"]
"""Which row of a block predicts which slot.

fill-in: row j is slot j, so row 0 (the anchor) predicts nothing; B rows. anchor-first: row j predicts slot j + 1, the
token after its own position, so the anchor's row predicts too; B - 1 rows (DeepSpec's gamma).
"""


class MarkovConfig(Frozen):
    """Adds to a slot's logits a bias that the token of the slot before it decides."""

    kind: MarkovKind
    rank: PositiveInt

    def tensors(self, hidden_size: int, vocab_size: int, draft_vocabulary: int) -> dict[str, tuple[int, ...]]:
        """`markov_w1` is asked by target ids, `markov_w2` answers in draft ids."""
        rank = self.rank
        shapes: dict[str, tuple[int, ...]] = {
            "markov_head.markov_w1.weight": (vocab_size, rank),
            "markov_head.markov_w2.weight": (draft_vocabulary, rank),
        }
        if self.kind == "gated":
            shapes |= {
                "markov_head.gate_proj.weight": (rank, hidden_size + rank),
                "markov_head.gate_proj.bias": (rank,),
            }
        if self.kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden_size)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
        return shapes


class ConfidenceConfig(Frozen):
    """Says of each slot how likely it is to be accepted, the slots before it given."""

    with_markov: bool
    """Whether it reads the Markov embedding of the token before, too."""

    def tensors(self, hidden_size: int, markov_rank: int) -> dict[str, tuple[int, ...]]:
        """One linear layer."""
        inputs = hidden_size + (markov_rank if self.with_markov else 0)
        return {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}


class ConvolutionConfig(Frozen):
    """Causal convolutions over the rows of a block, before and after attention and MLP of every layer."""

    taps: PositiveInt
    """Rows that an output reads: its own and those before it."""
    group_size: PositiveInt
    """Channels that share their coefficients; divides the hidden size."""

    def tensors(self, hidden_size: int, num_layers: int) -> dict[str, tuple[int, ...]]:
        """`base_kernel`'s first index: 0 = before the sublayer, 1 = after it."""
        coefficients = 2 * self.taps * (hidden_size // self.group_size)
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(num_layers):
            for sublayer in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{layer}.{sublayer}.base_kernel"] = (2, self.taps, hidden_size)
                shapes[f"layers.{layer}.{sublayer}.kernel_projection.weight"] = (coefficients, hidden_size)
        return shapes


class SelectorConfig(Frozen):
    """Chooses each slot's token among its likeliest candidates by the token before it."""

    rank: PositiveInt
    top_k: PositiveInt
    """Candidates of a slot."""

    def tensors(self, hidden_size: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """The codebooks have no `.weight` in z-lab's files."""
        return {
            "candidate_selector.hidden_projection.weight": (self.rank, hidden_size),
            "candidate_selector.predecessor_codebook": (vocab_size, self.rank),
            "candidate_selector.successor_codebook": (vocab_size, self.rank),
        }


class Heads(Frozen):
    """What a drafter has besides plain DFlash; None = it has not. Without any it is plain DFlash."""

    slots: Slots = "fill-in"
    draft_vocabulary: PositiveInt | None = None
    """Tokens that it can draft, where they are fewer than the target's: it has an `lm_head` of its own for them."""
    markov: MarkovConfig | None = None
    confidence: ConfidenceConfig | None = None
    convolution: ConvolutionConfig | None = None
    selector: SelectorConfig | None = None

    @property
    def family(self) -> Literal["DFlash", "DFlash2", "DSpark"]:
        """What engines call it: DSpark with a Markov head, DFlash2 with a selector, else DFlash."""
        return "DSpark" if self.markov else "DFlash2" if self.selector else "DFlash"

    @property
    def first_row(self) -> int:
        """The row of a block that predicts slot 1; those of the slots behind it follow."""
        return 1 if self.slots == "fill-in" else 0

    @property
    def words(self) -> str:
        """The heads in a few words; "" of plain DFlash."""
        parts = [f"{self.markov.kind} Markov head of rank {self.markov.rank}"] if self.markov else []
        parts += ["confidence head"] if self.confidence else []
        parts += [f"convolutions of {self.convolution.taps} taps"] if self.convolution else []
        parts += [f"selector among {self.selector.top_k}"] if self.selector else []
        parts += [f"{self.draft_vocabulary:,} tokens"] if self.draft_vocabulary else []
        return ", ".join([*parts, *(["anchor-first slots"] if self.slots == "anchor-first" else [])])
