"""Transformers of diffusers over ranks, against one process in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import flexcp
from flexcp import testing
from tests.integrations.tiny_transformers import (
    CASES,
    flux,
    flux_arguments,
    sd3,
    sd3_arguments,
    wan,
    wan_arguments,
)

pytest.importorskip("diffusers")
from flexcp.integrations import diffusers as cp_diffusers


def require_close(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Up to 1e-6 of the largest number: parts of Wan compute in float32 whatever they are given."""
    worst = float((found - expected).abs().max())
    assert worst <= 1e-6 * float(expected.abs().max()), (what, worst)


def in_float64(given):
    return {k: x.double() if x.is_floating_point() else x for k, x in given.items()}


def randomised(model: nn.Module) -> nn.Module:
    """Numbers everywhere: fresh models have gates of 0, behind which anything would be right."""
    model = model.double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def train(model: nn.Module, given, weight):
    out = model(**given).sample
    loss = (out * weight).square().mean()
    loss.backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


def one_process(model: nn.Module, given):
    mine = copy.deepcopy(model)
    weight = torch.randn_like(mine(**given).sample)
    return weight, *train(mine, given, weight)


def require_same(found, expected):
    for out, gradients in found:
        require_close(out, expected[0])
        for name, gradient in expected[1].items():
            require_close(gradients[name], gradient, name)


@pytest.mark.parametrize("name", CASES)
def test_results_and_summed_gradients_are_those_of_one_process_for_any_lengths(name):
    model, given = randomised(CASES[name].make()), in_float64(CASES[name].arguments())
    weight, *expected = one_process(model, given)

    def rank(mesh):
        mine = copy.deepcopy(model)
        cp = cp_diffusers.attach(mine, mesh)
        found = train(mine, given, weight)
        cp.sum_gradients()
        return found

    require_same(testing.simulate(rank, 3), expected)


def test_averaged_gradients_are_those_of_one_process_too():
    model, given = randomised(flux()), in_float64(flux_arguments(text=1))  # a rank without text
    weight, *expected = one_process(model, given)

    def rank(mesh):
        mine = copy.deepcopy(model)
        cp = cp_diffusers.attach(mine, mesh, gradients="averaged")
        out, gradients = train(mine, given, weight)
        cp.sum_gradients()
        return out, {name: grad / 2 for name, grad in gradients.items()}

    require_same(testing.simulate(rank, 2), expected)


@pytest.mark.parametrize("gradients", ["summed", "averaged"])
def test_a_module_after_the_transformer_and_one_before_it_count_once(gradients):
    model, given = randomised(wan()), in_float64(wan_arguments())
    head, prompt = nn.Conv3d(3, 2, 1).double(), nn.Linear(6, 6).double()

    def step(mine, last, first):
        text = first(given["encoder_hidden_states"])
        out = last(mine(**given | {"encoder_hidden_states": text}).sample)
        out.square().sum().backward()
        return [p.grad for m in (mine, last, first) for p in m.parameters()]

    expected = step(*copy.deepcopy((model, head, prompt)))

    def rank(mesh):
        mine, last, first = copy.deepcopy((model, head, prompt))
        cp = cp_diffusers.attach(mine, mesh, gradients=gradients)
        cp.count_once(last)
        return step(mine, last, first)

    found = testing.simulate(rank, 2)
    share = 1 if gradients == "summed" else 1 / 2
    for grads, one in zip(zip(*found, strict=True), expected, strict=True):
        require_close(sum(grads) * share, one)


@pytest.mark.parametrize(("make", "arguments"), [(flux, flux_arguments), (wan, wan_arguments)])
def test_blocks_that_are_recomputed_are_sharded_as_they_were(make, arguments):
    model, given = randomised(make()), in_float64(arguments())
    other = in_float64(arguments(height=4))
    weight, *expected = one_process(model, given)

    def rank(mesh):
        mine = copy.deepcopy(model)
        mine.enable_gradient_checkpointing()
        cp = cp_diffusers.attach(mine, mesh)
        out = mine(**given).sample
        mine(**other)  # a call of another size, before the backward pass of the first
        (out * weight).square().mean().backward()
        cp.sum_gradients()
        return out.detach(), {name: p.grad for name, p in mine.named_parameters()}

    require_same(testing.simulate(rank, 2), expected)


def test_text_with_as_many_tokens_as_a_rank_has_of_the_video_is_still_attended_to_as_a_whole():
    model, given = randomised(wan()), in_float64(wan_arguments(frames=2, text=5))
    assert given["encoder_hidden_states"].shape[1] == 2 * 1 * 5 // 2
    expected = model(**given).sample

    def rank(mesh):
        mine = copy.deepcopy(model)
        cp_diffusers.attach(mine, mesh)
        return mine(**given).sample

    for out in testing.simulate(rank, 2):
        require_close(out, expected)


def test_calls_with_an_image_and_text_as_context_are_those_of_one_process():
    model = randomised(wan(image_dim=4))
    given = in_float64(wan_arguments(text=512)) | {
        "encoder_hidden_states_image": torch.randn(2, 3, 4).double()
    }
    expected = model(**given).sample

    def rank(mesh):
        mine = copy.deepcopy(model)
        cp_diffusers.attach(mine, mesh)
        return mine(**given).sample

    for out in testing.simulate(rank, 3):
        require_close(out, expected)


def test_residuals_of_a_controlnet_are_sharded_with_the_image():
    model, given = randomised(flux()), in_float64(flux_arguments())
    given["controlnet_block_samples"] = [torch.randn(2, 15, 24).double()]
    given["controlnet_single_block_samples"] = (torch.randn(2, 15, 24).double(),)
    expected = model(**given).sample

    def rank(mesh):
        mine = copy.deepcopy(model)
        cp_diffusers.attach(mine, mesh)
        return mine(**given).sample

    require_close(testing.simulate(rank, 2)[1], expected)


def on_processes(mesh):
    torch.manual_seed(0)
    model, given = randomised(sd3()), in_float64(sd3_arguments())
    weight, *expected = one_process(model, given)
    cp = cp_diffusers.attach(model, mesh)
    found = train(model, given, weight)
    cp.sum_gradients()
    require_same([found], expected)


def test_processes_give_what_one_gives():
    testing.spawn(on_processes, 2)


def test_a_detached_transformer_is_as_it_was_and_can_be_attached_again():
    model, given = randomised(sd3()), in_float64(sd3_arguments())
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    expected = model(**given).sample

    def rank(mesh):
        mine = copy.deepcopy(model)
        for _ in range(2):
            cp = cp_diffusers.attach(mine, mesh)
            cp_diffusers.detach(mine)
            cp.detach()
        assert {name: set(vars(m)) for name, m in mine.named_modules()} == before
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in mine.modules())
        return mine(**given).sample

    assert torch.equal(testing.simulate(rank, 2)[0], expected)


def refused(call) -> str:
    def rank(mesh):
        with pytest.raises(flexcp.FlexCPError) as caught:
            call(mesh)
        return str(caught.value)

    return testing.simulate(rank, 1)[0]


def test_models_of_unknown_structure_are_refused_by_name():
    from diffusers import FluxTransformer2DModel, PixArtTransformer2DModel

    unknown = PixArtTransformer2DModel(
        num_attention_heads=1, attention_head_dim=4, in_channels=1, out_channels=1, num_layers=1,
        norm_num_groups=1, cross_attention_dim=4, sample_size=2, caption_channels=4,
    )  # fmt: skip
    message = refused(lambda mesh: cp_diffusers.attach(unknown, mesh))
    assert "FluxTransformer2DModel" in message
    assert "got PixArtTransformer2DModel" in message

    class Mine(FluxTransformer2DModel):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    mine = Mine(num_layers=0, num_single_layers=0, attention_head_dim=8, num_attention_heads=1)
    message = refused(lambda mesh: cp_diffusers.attach(mine, mesh))
    assert "got Mine, which has one of its own" in message


def test_attention_that_is_not_known_is_refused_by_name():
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model = flux()
    block = model.transformer_blocks[0]
    block.attn.set_processor(FluxIPAdapterAttnProcessor(24, 24))
    message = refused(lambda mesh: cp_diffusers.attach(model, mesh))
    assert "got FluxIPAdapterAttnProcessor in 'transformer_blocks.0.attn'" in message


def test_a_transformer_that_is_parallel_already_is_refused():
    model = flux()

    def twice(mesh):
        cp_diffusers.attach(model, mesh)
        cp_diffusers.attach(model, mesh)

    assert "got a FluxTransformer2DModel that is" in refused(twice)
    model = flux()
    model._parallel_config = object()  # what enable_parallelism sets
    message = refused(lambda mesh: cp_diffusers.attach(model, mesh))
    assert "on which enable_parallelism was called" in message


def test_a_number_of_ranks_is_no_mesh():
    with pytest.raises(flexcp.FlexCPError, match="got the number of ranks 2"):
        cp_diffusers.attach(flux(), 2)


def test_a_mask_and_lengths_that_differ_are_refused_before_anything_is_computed():
    model, given = randomised(flux()), in_float64(flux_arguments())

    def masked(mesh):
        cp = cp_diffusers.attach(model, mesh)
        try:
            mask = torch.ones(19, 19, dtype=torch.bool)
            model(**given, joint_attention_kwargs={"attention_mask": mask})
        finally:
            cp.detach()

    assert "got an attn_mask" in refused(masked)

    def uneven(mesh):
        cp_diffusers.attach(model, mesh)
        model(**given | {"img_ids": given["img_ids"][1:]})

    assert "expected img_ids with 15 tokens along dim -2" in refused(uneven)


def test_a_cache_of_blocks_is_refused():
    from diffusers import FirstBlockCacheConfig

    model, given = randomised(flux()), in_float64(flux_arguments())
    model.enable_cache(FirstBlockCacheConfig())

    def cached(mesh):
        cp_diffusers.attach(model, mesh)
        model(**given)

    assert "got one with enable_cache" in refused(cached)


def test_a_forward_pass_that_leaves_out_where_tokens_are_gathered_is_refused():
    model, given = randomised(flux()), in_float64(flux_arguments())

    def without_hooks(mesh):
        cp_diffusers.attach(model, mesh)
        model.proj_out = nn.Linear(24, 4).double()
        model(**given)

    message = refused(without_hooks)
    assert "expected FluxTransformer2DModel to run 'proj_out'" in message
    assert "got a forward pass of diffusers 0." in message
