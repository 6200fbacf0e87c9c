"""What a decoder needs to know about its model, from config.json or a preset."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_spec.errors import LoadError, SpecError
from mlx_spec.families import family_of
from mlx_spec.presets import PRESETS

QkNorm = Literal["none", "head", "full"]
RouterScoring = Literal["softmax", "topk_softmax", "sigmoid"]
Activation = Literal["silu", "swiglu_oai"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and arithmetic of one decoder-only model.

    Names follow Hugging Face's config.json where a field exists there. Sizes are
    counts of elements; ``sliding_window`` and ``max_position_embeddings`` are
    counts of tokens. The preset ``glm-5.2`` is the family's grouped-query form;
    the shipped GLM-5 checkpoints use multi-head latent attention with sparse
    attention (MLA/DSA) and load through the mlx-lm adapter instead.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int = 0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool = False

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm = "none"
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_sinks: bool = False
    layer_types: tuple[str, ...] = ()  # empty: full attention everywhere
    sliding_window: int | None = None

    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    rope_traditional: bool = False
    partial_rotary_factor: float = 1.0

    mlp_bias: bool = False
    activation: Activation = "silu"

    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    expert_bias: bool = False
    num_shared_experts: int = 0
    shared_expert_size: int = 0  # 0: num_shared_experts × moe_intermediate_size
    shared_expert_gated: bool = False
    first_k_dense_replace: int = 0
    last_moe_layer: int | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    router_scoring: RouterScoring = "softmax"
    router_bias: bool = False
    router_float32: bool = False  # else the router computes in the activations' type
    router_from_end: bool = False  # which of equal scores wins, as in mlx-lm
    router_correction_bias: bool = False
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise LoadError(
                f"{self.num_attention_heads} attention heads cannot share "
                f"{self.num_key_value_heads} key-value heads evenly"
            )
        if self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise LoadError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, "
                f"but there are {self.num_experts} experts"
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Read a published config.json.

        Raises:
            LoadError: If the model_type is unknown or a needed field is missing.
        """
        # A field that is null says no more than one that is missing.
        hf = {name: value for name, value in hf.items() if value is not None}
        act = hf.get("hidden_act", "silu")
        if act not in ("silu", "swiglu"):
            raise LoadError(f"hidden_act {act!r} is not supported", "supported: 'silu'")
        return cls(**family_of(hf).fields(hf))

    @classmethod
    def preset(cls, name: str) -> "ModelConfig":
        """Return a known model's config, as published in its config.json.

        Raises:
            SpecError: If there is no preset of that name.
        """
        if name not in PRESETS:
            raise SpecError(
                f"no preset {name!r}", f"presets: {', '.join(sorted(PRESETS))}"
            )
        return cls.from_hf(PRESETS[name])

    def replace(self, **changes: Any) -> "ModelConfig":
        """Return a copy with some fields changed, for example to shrink a preset."""
        return replace(self, **changes)

    @property
    def shared_width(self) -> int:
        """Inner width of the shared expert (0 if there is none)."""
        shared = self.num_shared_experts * self.moe_intermediate_size
        return self.shared_expert_size or shared

    def window_of(self, layer: int) -> int | None:
        """Attention window of a layer in tokens, None for full attention."""
        if layer < len(self.layer_types) and (
            self.layer_types[layer] == "sliding_attention"
        ):
            return self.sliding_window
        return None

    def is_moe_layer(self, layer: int) -> bool:
        """Tell whether a layer's feed-forward part is a mixture of experts."""
        return (
            self.num_experts > 0
            and self.first_k_dense_replace <= layer
            and (self.last_moe_layer is None or layer <= self.last_moe_layer)
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )
