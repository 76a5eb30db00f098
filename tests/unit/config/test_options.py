"""Fact: an option of the model is declared once, and is a key of the configuration and a value of the architecture."""

from __future__ import annotations

from dataclasses import fields

from megatron3d.config.model_defaults import resolve_architecture
from megatron3d.config.read import nearest_key
from megatron3d.config.schema import ModelConfig, declared
from megatron3d.model.option_table import ModelOptions
from megatron3d.model.spec import Architecture

OPTIONS = {each.name for each in fields(ModelOptions)}
# Keys whose values have another form in the architecture.
OTHER_FORM = {"rotary_scaling", "no_rope_freq"}


def test_what_a_key_and_the_architecture_share_is_declared_as_an_option() -> None:
    shared = set(ModelConfig.model_fields) & {each.name for each in fields(Architecture)}
    assert shared - OTHER_FORM == OPTIONS
    assert OPTIONS.isdisjoint(ModelConfig.__annotations__)


def test_names_elsewhere_lead_to_the_option_that_declares_them() -> None:
    for name in OPTIONS:
        for other in declared(ModelConfig.model_fields[name])["also"]:
            assert nearest_key("model", other) == f"model.{name}"


def test_an_option_that_is_set_reaches_the_architecture() -> None:
    model = ModelConfig(attention_softcap=3.0, norm_placement="post", use_parallel_residual=True)
    arch = resolve_architecture(model, 10)
    assert (arch.attention_softcap, arch.norm_placement, arch.use_parallel_residual) == (3.0, "post", True)
