"""Configs: published fields, presets, and what is refused."""

import pytest

from mlx_spec import LoadError, ModelConfig, SpecError
from mlx_spec.presets import PRESETS
from tests.checkpoints import FAMILIES, hf_config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_shrunk(name: str) -> None:
    config = ModelConfig.preset(name)
    small = config.replace(num_hidden_layers=2, vocab_size=9)
    assert (small.num_hidden_layers, small.vocab_size) == (2, 9)
    assert config.num_hidden_layers > 2
    assert any(small.is_moe_layer(layer) for layer in range(2))


def test_glm_5_2_is_its_grouped_query_form() -> None:
    config = ModelConfig.preset("glm-5.2")
    assert (config.num_hidden_layers, config.hidden_size) == (92, 6144)
    assert (config.num_attention_heads, config.num_key_value_heads) == (48, 8)
    assert (config.head_dim, config.vocab_size) == (128, 151_552)
    assert config.rope_theta == 1e6
    assert (config.num_experts, config.num_experts_per_tok) == (256, 8)
    assert (config.num_shared_experts, config.moe_intermediate_size) == (1, 2048)
    assert (config.router_scoring, config.norm_topk_prob) == ("sigmoid", True)
    assert "MLA" in (ModelConfig.__doc__ or "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3-30b-a3b", (48, 2048, 32, 4, 128, 128, 8, 768, 151_936)),
        ("glm-4.5-air", (46, 4096, 96, 8, 128, 128, 8, 1408, 151_552)),
        ("gpt-oss-20b", (24, 2880, 64, 8, 64, 32, 4, 2880, 201_088)),
        ("olmoe-1b-7b", (16, 2048, 16, 16, 128, 64, 8, 1024, 50_304)),
        ("mixtral-8x7b", (32, 4096, 32, 8, 128, 8, 2, 14_336, 32_000)),
        ("granite-3.1-1b-a400m", (24, 1024, 16, 8, 64, 32, 8, 512, 49_155)),
    ],
)
def test_presets_have_the_published_sizes(name: str, expected: tuple[int, ...]) -> None:
    c = ModelConfig.preset(name)
    assert expected == (
        c.num_hidden_layers,
        c.hidden_size,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.num_experts,
        c.num_experts_per_tok,
        c.moe_intermediate_size,
        c.vocab_size,
    )


def test_gpt_oss_alternates_between_window_and_full_attention() -> None:
    config = ModelConfig.preset("gpt-oss-20b")
    assert [config.window_of(layer) for layer in range(4)] == [128, None, 128, None]


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_are_frozen_and_read_from_published_fields(family: str) -> None:
    config = ModelConfig.from_hf(hf_config(family))
    assert config.model_type == family
    with pytest.raises(AttributeError):
        config.hidden_size = 3  # type: ignore[misc]


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"no preset 'glm-6'.*glm-5\.2"):
        ModelConfig.preset("glm-6")


def test_an_unknown_model_type_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(LoadError, match=r"'mamba9' is not supported.*qwen3_moe"):
        ModelConfig.from_hf({"model_type": "mamba9"})


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"num_experts_per_tok": 99},
        {"num_key_value_heads": 3},
        {"hidden_act": "relu"},
    ],
)
def test_broken_configs_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(LoadError):
        ModelConfig.from_hf(hf_config("qwen3_moe") | changes)
